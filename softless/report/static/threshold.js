// The slider: a mark on every twin's path, the tau in the figure above, and a sentence.
const tau = document.getElementById("tau");
if (tau) {
  const figure = page.figures.find((each) => each.id === "threshold");
  const error = page.figures.find((each) => each.id === "range-error");
  const paths = Object.fromEntries(figure.panels[0].data.filter((trace) => trace.meta.path).map((trace) => [trace.meta.twin, trace]));
  const taus = Object.values(paths).reduce((longest, path) => (path.customdata.length > longest.length ? path.customdata : longest), []);
  const at = (path) => Math.min(Number(tau.value), path.x.length - 1);
  extra["threshold-0"] = {
    trace: (trace) => {
      if (!trace.meta.follows) return trace;
      const path = paths[trace.meta.twin];
      return { ...trace, x: [path.x[at(path)]], y: [path.y[at(path)]] };
    },
  };
  const move = () => {
    const value = taus[Number(tau.value)];
    extra["range-error-0"] = {
      layout: { shapes: [{ type: "line", x0: value, x1: value, yref: "paper", y0: 0, y1: 1, line: { color: "#6b6b6b", width: 1.5, dash: "dash" } }] },
    };
    const says = Object.entries(paths).filter(([twin]) => !hidden.has(twin)).map(([, path]) => ({ name: path.name, kept: path.x[at(path)], lost: path.y[at(path)] }));
    says.sort((a, b) => a.lost - b.lost);
    const one = ({ name, kept, lost }) => `${name} keeps ${kept.toFixed(0)}% of its keys and loses ${lost.toFixed(lost < 10 ? 1 : 0)}% of softmax's weight`;
    const few = says.length > 1 ? [says[0], says[says.length - 1]] : says;
    document.getElementById("tau-value").textContent = value.toFixed(2);
    document.getElementById("tau-says").textContent = `At tau = ${value}, ${few.map(one).join("; ")}.`;
    tau.setAttribute("aria-valuetext", `tau ${value}`);
  };
  tau.max = String(taus.length - 1);
  tau.value = String(Math.max(0, taus.findIndex((value) => value >= 1)));
  move();
  tau.addEventListener("input", () => { move(); drawFigure(figure); if (error) drawFigure(error); });
  document.addEventListener("redraw", move);
}
