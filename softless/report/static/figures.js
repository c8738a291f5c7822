"use strict";
// Every figure, in the theme that is shown, with the twins and the choice that are shown.
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const report = read("report-data");
const page = read("figure-data");
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
const color = (paper) => (isDark() && page.dark[paper]) || paper;
const NARROW = 560;
const hidden = new Set();
const picked = {};
const extra = {}; // what a slider adds to a plot: id -> {layout, traces(trace)}

function recolor(value) {
  if (typeof value === "string") return color(value);
  if (Array.isArray(value)) return value.length > 64 ? value : value.map(recolor);
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, recolor(v)]));
  return value;
}

function visible(trace, figure) {
  const { twin, pick } = trace.meta || {};
  const chosen = picked[figure.id] || figure.picks[0]?.value;
  return !hidden.has(twin) && (pick && chosen ? pick === chosen : trace.visible !== false);
}

function set(layout, path, value) {
  const keys = path.split(".");
  const last = keys.pop();
  const at = keys.reduce((inner, key) => (inner[key] ??= {}), layout);
  if (last === "title") at.title.text = value; else at[last] = value;
}

// On a narrow screen names would cover what they name; the legend stays in sight.
function leaveOutNames(traces, layout) {
  for (const trace of traces) if (trace.meta?.twin) trace.mode = trace.mode?.replace("+text", "");
  if (layout.margin.r > 60) layout.margin.r = 76;
}

function draw(figure, index, width) {
  const id = `${figure.id}-${index}`;
  const { data, layout } = figure.panels[index];
  const shown = structuredClone(layout);
  const pick = figure.picks.find((each) => each.value === picked[figure.id]);
  for (const [path, value] of Object.entries(pick ? pick.layout : {})) set(shown, path, value);
  Object.assign(shown, extra[id]?.layout);
  const traces = data.map((trace) => ({ ...(extra[id]?.trace?.(trace) || trace), visible: visible(trace, figure) }));
  Object.assign(shown.hoverlabel, { bgcolor: isDark() ? "#20242a" : "#ffffff", bordercolor: "#9a9a9a" });
  const box = document.getElementById(id);
  if ((width || box.clientWidth) < NARROW) leaveOutNames(traces, shown);
  if (width) shown.width = figure.columns > 1 ? width / 2 - 20 : width;
  Plotly.react(id, recolor(traces), recolor(shown), { displayModeBar: false, responsive: true });
  box.dataset.drawn = "yes";
}

function drawFigure(figure, width) {
  figure.panels.forEach((_, index) => draw(figure, index, width));
}

function drawAll(width) {
  page.figures.forEach((figure) => drawFigure(figure, width));
  document.dispatchEvent(new Event("redraw"));
}

// What is in sight first, the rest while nothing else happens.
function begin() {
  const waiting = new Set(page.figures);
  const take = (figure) => waiting.delete(figure) && drawFigure(figure);
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) take(page.figures.find((figure) => figure.id === entry.target.id));
  }, { rootMargin: "300px" });
  page.figures.forEach((figure) => near.observe(document.getElementById(figure.id)));
  const next = () => {
    for (const figure of waiting) { take(figure); break; }
    waiting.size ? setTimeout(next, 30) : (near.disconnect(), root.dataset.ready = "yes");
  };
  document.dispatchEvent(new Event("redraw"));
  setTimeout(next, 30);
}

function showTheme() {
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", String(isDark()));
}

document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
  drawAll();
});
prefersDark.addEventListener("change", () => { showTheme(); drawAll(); });

for (const chip of document.querySelectorAll(".chip")) {
  chip.addEventListener("click", () => {
    const twin = chip.dataset.twin;
    hidden.has(twin) ? hidden.delete(twin) : hidden.add(twin);
    chip.setAttribute("aria-pressed", String(!hidden.has(twin)));
    for (const panel of document.querySelectorAll(".panel[data-twin]")) panel.hidden = hidden.has(panel.dataset.twin);
    const about = (figure) => figure.panels.some((panel) => panel.data.some((trace) => trace.meta?.twin === twin));
    page.figures.filter(about).forEach((figure) => drawFigure(figure));
    document.dispatchEvent(new Event("redraw"));
  });
}

for (const choice of document.querySelectorAll(".switch")) {
  choice.addEventListener("change", (event) => {
    picked[choice.dataset.figure] = event.target.value;
    drawFigure(page.figures.find((figure) => figure.id === choice.dataset.figure));
  });
}

// A link to data that has no file beside the page hands out that part of report.json.
for (const link of document.querySelectorAll("a[data-part]")) {
  link.addEventListener("click", () => {
    const part = link.dataset.part.split(".").filter(Boolean).reduce((at, key) => at[key], report);
    link.href = URL.createObjectURL(new Blob([JSON.stringify(part, null, 2)], { type: "application/json" }));
  });
}

// On paper: light, and as wide as the paper, with two panels side by side as study.css has them there.
let before;
addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; drawAll(680); });
addEventListener("afterprint", () => {
  if (before) root.dataset.theme = before; else delete root.dataset.theme;
  drawAll();
  for (const plot of document.querySelectorAll(".plot")) if (plot.offsetParent) Plotly.Plots.resize(plot);
});

const links = [...document.querySelectorAll(".contents a")];
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) links.forEach((link) => link.classList.toggle("here", link.hash === `#${entry.target.id}`));
}, { rootMargin: "-15% 0px -75% 0px" });
links.forEach((link) => seen.observe(document.querySelector(link.hash)));
