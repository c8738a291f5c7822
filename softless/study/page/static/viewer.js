// The attention viewer: one image to point at, and one map per twin. The area of a square is a weight.
const source = document.getElementById("viewer-source");
if (source) {
  const { grid: [rows, columns], images, maps } = report.viewer;
  const patches = rows * columns;
  const layer = document.getElementById("viewer-layer");
  const scale = document.getElementById("viewer-scale");
  const thumbs = [...document.querySelectorAll(".thumbs button")];
  const pictures = images.map(({ png }) => Object.assign(new Image(), { src: png }));
  let image = 0;
  let patch = Math.floor(rows / 2) * columns + Math.floor(columns / 2);

  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const decoded = new WeakMap(); // kept apart from the report, which the page offers for download unchanged
  const find = (twin) => maps.find((map) => map.twin === twin && map.layer === layer.value && map.image === image);

  // Return the weights that the patch gives to every patch, without the tokens before the grid (a class token).
  function weights(map) {
    if (!decoded.has(map)) decoded.set(map, bytes(map.weights));
    const tokens = map.row_max.length;
    const prefix = tokens - patches;
    const row = prefix + patch;
    return Array.from({ length: patches }, (_, key) => (decoded.get(map)[row * tokens + prefix + key] / 255) * map.row_max[row]);
  }

  // Return the name of a file without its folders.
  const bare = (name) => name.split(/[\\/]/).pop();

  // Return a copy of the twin's swatch in the legend.
  function swatch({ id }) {
    return document.querySelector(`.chip[data-twin="${CSS.escape(id)}"] .swatch`).cloneNode(true);
  }

  const panels = page.twins.filter(({ id }) => maps.some((map) => map.twin === id)).map((twin) => {
    const box = document.createElement("div");
    const title = document.createElement("h4");
    const canvas = document.createElement("canvas");
    title.append(swatch(twin), twin.label);
    canvas.setAttribute("role", "img");
    box.append(title, canvas);
    document.getElementById("viewer-maps").append(box);
    return { ...twin, box, canvas };
  });

  // Return a context that draws in units of patches, as sharp as the screen.
  function brush(canvas) {
    const width = canvas.clientWidth || 150;
    const density = devicePixelRatio || 1;
    canvas.style.aspectRatio = `${columns} / ${rows}`;
    canvas.width = Math.round(width * density);
    canvas.height = Math.round((canvas.width * rows) / columns);
    const context = canvas.getContext("2d");
    context.scale(canvas.width / columns, canvas.height / rows);
    context.imageSmoothingEnabled = false;
    return context;
  }

  function picture(context, opacity) {
    context.fillStyle = getComputedStyle(root).getPropertyValue("--wash");
    context.fillRect(0, 0, columns, rows);
    context.globalAlpha = opacity;
    if (pictures[image].complete && pictures[image].naturalWidth) context.drawImage(pictures[image], 0, 0, columns, rows);
    context.globalAlpha = 1;
  }

  // Outline the patch in ink with a halo of paper, which is visible on any image and on any map.
  function outline(context) {
    const [row, column] = [Math.floor(patch / columns), patch % columns];
    const pixel = columns / context.canvas.width;
    const style = getComputedStyle(root);
    for (const [name, wide] of [["--paper", 6], ["--ink", 2.5]]) {
      context.lineWidth = wide * pixel * (devicePixelRatio || 1);
      context.strokeStyle = style.getPropertyValue(name);
      context.strokeRect(column, row, 1, 1);
    }
  }

  function squares(context, values, top, fill) {
    context.fillStyle = fill;
    values.forEach((value, key) => {
      const side = 0.96 * Math.sqrt(Math.max(0, value) / top);
      const [row, column] = [Math.floor(key / columns), key % columns];
      context.fillRect(column + (1 - side) / 2, row + (1 - side) / 2, side, side);
    });
  }

  // Return the share of the positive weight that falls on the 3 x 3 around the patch.
  function near(values) {
    const total = values.reduce((sum, value) => sum + value, 0) || 1;
    const [row, column] = [Math.floor(patch / columns), patch % columns];
    return values.reduce((sum, value, key) => {
      const inside = Math.abs(Math.floor(key / columns) - row) <= 1 && Math.abs((key % columns) - column) <= 1;
      return sum + (inside ? value / total : 0);
    }, 0);
  }

  function show() {
    const context = brush(source);
    picture(context, 1);
    outline(context);
    const seen = panels.map((panel) => ({ ...panel, map: find(panel.id) })).filter(({ id, map }) => map && !hidden.has(id));
    for (const panel of panels) panel.box.hidden = !seen.some(({ id }) => id === panel.id);
    const found = seen.map((panel) => ({ ...panel, values: weights(panel.map) }));
    const highest = Math.max(...found.flatMap(({ values }) => values), 1e-12);
    for (const { canvas, values, label, color: paper } of found) {
      const context = brush(canvas);
      picture(context, isDark() ? 0.13 : 0.2);
      squares(context, values, scale.checked ? highest : Math.max(...values, 1e-12), color(paper));
      outline(context);
      canvas.setAttribute("aria-label", `${label}: ${(100 * near(values)).toFixed(0)}% of the weight on the 3 x 3 around the patch`);
    }
    const [row, column] = [Math.floor(patch / columns) + 1, (patch % columns) + 1];
    const shares = found.map(({ label, values }) => `${label} ${(100 * near(values)).toFixed(0)}%`).join(", ");
    document.getElementById("viewer-image").textContent = `${images[image].label} (${bare(images[image].name)})`;
    document.getElementById("viewer-says").textContent = `From row ${row}, column ${column}, this share of the positive weight falls on the 3 x 3 patches around it: ${shares}.`;
    source.dataset.patch = String(patch);
  }

  function point(event) {
    const box = source.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    if (row < 0 || column < 0 || row >= rows || column >= columns) return;
    const next = row * columns + column;
    if (next !== patch) { patch = next; show(); }
  }

  let held = false; // a click holds the patch until the next one
  source.addEventListener("pointermove", (event) => { if (!held || event.buttons) point(event); });
  source.addEventListener("pointerdown", (event) => { point(event); held = event.pointerType === "mouse" && !held; });
  source.addEventListener("keydown", (event) => {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const row = Math.min(rows - 1, Math.max(0, Math.floor(patch / columns) + step[0]));
    const column = Math.min(columns - 1, Math.max(0, (patch % columns) + step[1]));
    patch = row * columns + column;
    show();
  });

  function choose(index) {
    image = (index + images.length) % images.length;
    thumbs.forEach((thumb, each) => {
      thumb.setAttribute("aria-checked", String(each === image));
      thumb.tabIndex = each === image ? 0 : -1;
    });
    show();
  }
  thumbs.forEach((thumb, index) => {
    thumb.addEventListener("click", () => choose(index));
    thumb.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step) { event.preventDefault(); choose(image + step); thumbs[image].focus(); }
    });
  });
  layer.addEventListener("change", show);
  scale.addEventListener("change", show);
  pictures.forEach((each) => each.addEventListener("load", show));
  document.addEventListener("redraw", show);
  addEventListener("resize", show);
}
