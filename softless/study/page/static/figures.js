"use strict";
// Draw every figure in the current theme, with the twins and the choices that the reader selected.
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
const latest = {}; // the latest layout of each plot
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

async function draw(figure, index, width) {
  const id = `${figure.id}-${index}`;
  const { data, layout } = figure.panels[index];
  const shown = structuredClone(layout);
  const pick = figure.picks.find((each) => each.value === picked[figure.id]);
  for (const [path, value] of Object.entries(pick ? pick.layout : {})) set(shown, path, value);
  Object.assign(shown, extra[id]?.layout);
  const traces = data.map((trace) => ({ ...(extra[id]?.trace?.(trace) || trace), visible: visible(trace, figure) }));
  Object.assign(shown.hoverlabel, { bgcolor: isDark() ? "#20242a" : "#ffffff", bordercolor: "#9a9a9a" });
  const box = document.getElementById(id);
  if (!width && !box.clientWidth) return; // hidden with its twin, and drawn when the twin is shown again
  shown.width = width ? (figure.columns > 1 ? width / 2 - 20 : width) : box.clientWidth;
  if (shown.width < NARROW && shown.margin.r > 60) shown.margin.r = 80;
  const [inTheme, frame] = [recolor(traces), recolor(shown)];
  latest[id] = frame;
  await Plotly.react(id, inTheme, frame, { displayModeBar: false });
  if (latest[id] !== frame) return; // drawn again in the meantime
  await placeNames(box, inTheme, frame);
  box.dataset.drawn = "yes";
}

const drawFigure = (figure, width) => Promise.all(figure.panels.map((_, index) => draw(figure, index, width)));

function drawAll(width) {
  document.dispatchEvent(new Event("redraw"));
  return Promise.all(page.figures.map((figure) => drawFigure(figure, width)));
}

// Draw the figures in sight first, and the others one by one after that.
function begin() {
  const waiting = new Set(page.figures);
  const drawn = [];
  const take = (figure) => waiting.delete(figure) && drawn.push(drawFigure(figure));
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) take(page.figures.find((figure) => figure.id === entry.target.id));
  }, { rootMargin: "300px" });
  page.figures.forEach((figure) => near.observe(document.getElementById(figure.id)));
  const next = () => {
    for (const figure of waiting) { take(figure); break; }
    if (waiting.size) { setTimeout(next, 30); return; }
    near.disconnect();
    Promise.all(drawn).then(() => { root.dataset.ready = "yes"; });
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
    const about = (figure) => figure.twins.includes(twin) || figure.panels.some((panel) => panel.data.some((trace) => trace.meta?.twin === twin));
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

// Every data link downloads something that the page stores: a CSV file, or a part of report.json.
function carried({ file, part }) {
  if (file) return [page.files[file], "text/csv"];
  const found = part.split(".").filter(Boolean).reduce((at, key) => at[key], report);
  return [JSON.stringify(found, null, 2), "application/json"];
}
for (const link of document.querySelectorAll("a[download]")) {
  link.addEventListener("click", () => {
    const [text, type] = carried(link.dataset);
    link.href = URL.createObjectURL(new Blob([text], { type }));
  });
}

// Print in the light theme, as wide as the paper, with two panels side by side (see study.css).
let before;
addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; drawAll(680); });
addEventListener("afterprint", () => {
  if (before) root.dataset.theme = before; else delete root.dataset.theme;
  drawAll();
});

let lastWidth = innerWidth, resized;
addEventListener("resize", () => {
  if (innerWidth === lastWidth) return; // a phone that hides its address bar
  lastWidth = innerWidth;
  clearTimeout(resized);
  resized = setTimeout(drawAll, 150);
});

const links = [...document.querySelectorAll(".contents a")];
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) links.forEach((link) => link.classList.toggle("here", link.hash === `#${entry.target.id}`));
}, { rootMargin: "-15% 0px -75% 0px" });
links.forEach((link) => seen.observe(document.querySelector(link.hash)));

// Show where an element can be scrolled sideways: it fades at that end, and has a cue beside or below it.
for (const wide of document.querySelectorAll(".chips, .scroll")) {
  const cue = document.createElement(wide.matches(".chips") ? "span" : "p");
  cue.className = "cue";
  cue.setAttribute("aria-hidden", "true");
  wide.after(cue);
  const look = () => {
    const [left, right] = [wide.scrollLeft > 2, wide.scrollLeft + wide.clientWidth < wide.scrollWidth - 2];
    if (left || right) wide.dataset.more = left && right ? "both" : left ? "left" : "right"; else delete wide.dataset.more;
    cue.hidden = wide.scrollWidth <= wide.clientWidth + 2;
    cue.textContent = wide.matches(".chips") ? (right ? "\u203a" : "\u2039") : right ? "scroll sideways for more \u2192" : "\u2190 scroll back";
  };
  wide.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(wide);
  look();
}
