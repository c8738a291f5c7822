// The slider of tau moves a mark on every twin's path and a line in the figure above, and updates a sentence and a table.
const tau = document.getElementById("tau");
if (tau) {
  const figure = page.figures.find((each) => each.id === "threshold");
  const error = page.figures.find((each) => each.id === "range-error");
  const paths = Object.fromEntries(figure.panels[0].data.filter((trace) => trace.meta.path).map((trace) => [trace.meta.twin, trace]));
  const taus = Object.values(paths).reduce((longest, path) => (path.customdata.length > longest.length ? path.customdata : longest), []);
  // A twin may have been measured at other taus, in an earlier study: take the last tau up to the slider's.
  const at = (path) => Math.max(0, path.customdata.findLastIndex((each) => each <= taus[Number(tau.value)]));
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
    const shown = page.twins.filter(({ id }) => paths[id] && !hidden.has(id));
    const read = ({ id, label, mechanism }) => ({ label, mechanism, kept: paths[id].x[at(paths[id])], lost: paths[id].y[at(paths[id])] });
    const says = shown.map(read);
    const one = ({ label, kept, lost }) => `${label} keeps ${kept.toFixed(1)}% of its keys and loses ${lost.toFixed(1)}% of its weight`;
    const first = says.filter(({ mechanism }) => mechanism === "softmax");
    document.getElementById("tau-value").textContent = value.toFixed(2);
    document.getElementById("tau-says").textContent = says.length ? `At tau = ${value.toFixed(2)}, ${(first.length ? first : says.slice(0, 1)).map(one).join("; ")}.` : "";
    document.getElementById("tau-rows").replaceChildren(...says.map(({ label, kept, lost }) => {
      const row = document.createElement("tr");
      [label, kept.toFixed(1), lost.toFixed(1)].forEach((text, column) => {
        const cell = document.createElement(column ? "td" : "th");
        if (!column) cell.scope = "row";
        cell.textContent = text;
        row.append(cell);
      });
      return row;
    }));
    tau.setAttribute("aria-valuetext", `tau ${value.toFixed(2)}`);
  };
  tau.max = String(taus.length - 1);
  tau.value = String(Math.max(0, taus.findIndex((value) => value >= 1)));
  move();
  tau.addEventListener("input", () => { move(); drawFigure(figure); if (error) drawFigure(error); });
  document.addEventListener("redraw", move);
}
