// Names in figures. A trace with meta.label gets a name, at the first place where it covers no curve, no mark and no
// other name. A name without such a place is left out: the legend has it, too.
const LINE_HEIGHT = 15; // pixels
const AWAY = [6, 12, 20, 32, 48, 70, 100]; // pixels from a mark or curve; from a mark, the far ones get a thin line to it
const LEADER = 20;
const SIDES = [[1, 0], [-1, 0], [1, -1], [1, 1], [-1, -1], [-1, 1], [0, -1], [0, 1]]; // right, down
const pen = document.createElement("canvas").getContext("2d");

// Return whether a straight line touches a box, by clipping the line (Liang and Barsky).
function touches([x0, y0, x1, y1], box) {
  let [start, end] = [0, 1];
  for (const [step, room] of [[x0 - x1, x0 - box.left], [x1 - x0, box.right - x0], [y0 - y1, y0 - box.top], [y1 - y0, box.bottom - y0]]) {
    if (step === 0) { if (room < 0) return false; continue; }
    if (step < 0) start = Math.max(start, room / step); else end = Math.min(end, room / step);
    if (start > end) return false;
  }
  return true;
}

const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
const around = (x, y, reach) => ({ left: x - reach, right: x + reach, top: y - reach, bottom: y + reach });

function pixels(trace, { xaxis, yaxis }) {
  const points = Array.from(trace.x, (x, i) => [xaxis.d2p(x), yaxis.d2p(trace.y[i]), i]);
  return points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
}

// What names must not lie on: the pieces of every curve, the zero and dashed lines, and a box around every mark and bar.
function obstacles(traces, full, shapes) {
  const lines = [], boxes = [], marks = [];
  for (const trace of traces) {
    const points = pixels(trace, full);
    const size = trace.marker?.size ?? 6;
    if (trace.mode?.includes("lines")) points.slice(1).forEach(([x, y], i) => lines.push([points[i][0], points[i][1], x, y]));
    if (trace.mode?.includes("markers")) points.forEach(([x, y, i]) => marks.push(around(x, y, (size[i] ?? size) / 2 + 2)));
    points.forEach(([x, , i]) => {
      const { array, arrayminus } = trace.error_y || {};
      if (!array?.[i] && !arrayminus?.[i]) return;
      const ends = [trace.y[i] - arrayminus[i], trace.y[i] + array[i]].map((end) => full.yaxis.d2p(end));
      if (ends.every(Number.isFinite)) boxes.push({ left: x - 5, right: x + 5, top: Math.min(...ends) - 2, bottom: Math.max(...ends) + 2 });
    });
  }
  const zero = full.yaxis.type === "linear" ? full.yaxis.d2p(0) : -1;
  if (zero >= 0 && zero <= full._size.h) lines.push([0, zero, full._size.w, zero]);
  for (const { x0 } of shapes) lines.push([full.xaxis.d2p(x0), 0, full.xaxis.d2p(x0), full._size.h]);
  return { lines, boxes: [...boxes, ...marks], marks };
}

// Return the points beside which a name may stand: its mark, or its curve every few pixels, from the last point back.
function anchors(points) {
  const found = points.slice(-1);
  for (let i = points.length - 1; i > 0; i -= 1) {
    const [[x0, y0], [x1, y1]] = [points[i], points[i - 1]];
    const steps = Math.ceil(Math.hypot(x1 - x0, y1 - y0) / 12);
    for (let step = 1; step <= steps; step += 1) found.push([x0 + ((x1 - x0) * step) / steps, y0 + ((y1 - y0) * step) / steps]);
  }
  return found;
}

function* places(points, width, reach) {
  const own = anchors(points);
  for (const away of points.length > 1 ? AWAY.slice(0, 3) : AWAY) {
    for (const [x, y] of own) {
      for (const [right, down] of SIDES) {
        const gap = (away + reach) * (right && down ? 0.75 : 1);
        const left = right > 0 ? x + gap : right < 0 ? x - gap - width : x - width / 2;
        const top = down > 0 ? y + gap : down < 0 ? y - gap - LINE_HEIGHT : y - LINE_HEIGHT / 2;
        yield { left, right: left + width, top, bottom: top + LINE_HEIGHT, away, x, y };
      }
    }
  }
}

function placeNames(box, traces, layout) {
  const wanted = traces.filter((trace) => trace.visible && trace.meta?.label);
  if (!wanted.length) return undefined;
  const full = box._fullLayout;
  const { w, h, r } = full._size;
  const { lines, boxes, marks } = obstacles(traces.filter((trace) => trace.visible), full, layout.shapes || []);
  const names = [], annotations = [...(layout.annotations || [])], shapes = [...(layout.shapes || [])];
  pen.font = `12px ${full.font.family}`;
  const free = (place) => place.left >= 2 && place.right <= w + r - 2 && place.top >= 0 && place.bottom <= h
    && !boxes.some((each) => meet(place, each)) && !lines.some((line) => touches(line, { left: place.left - 1, right: place.right + 1, top: place.top, bottom: place.bottom }));
  for (const trace of wanted) {
    const points = pixels(trace, full);
    if (!points.length) continue;
    const reach = trace.mode.includes("markers") ? (trace.marker.size[points.length - 1] ?? trace.marker.size) / 2 : 0;
    const width = pen.measureText(trace.meta.label).width + 4;
    for (const place of places(points, width, reach)) {
      if (!free(place)) continue;
      const line = points.length === 1 && place.away >= LEADER ? leader(place) : null;
      const others = line ? [...names, ...marks.filter((each) => !meet(each, around(line[0], line[1], 1)))] : [];
      if (others.some((each) => touches(line, each))) continue;
      if (line) {
        lines.push(line);
        shapes.push({ type: "line", xref: "paper", yref: "paper", x0: line[0] / w, y0: 1 - line[1] / h, x1: line[2] / w, y1: 1 - line[3] / h, line: { width: 1, color: trace.marker.color } });
      }
      names.push(place);
      boxes.push({ left: place.left - 2, right: place.right + 2, top: place.top, bottom: place.bottom });
      annotations.push({ xref: "paper", yref: "paper", x: (place.left + width / 2) / w, y: 1 - (place.top + LINE_HEIGHT / 2) / h, text: trace.meta.label, xanchor: "center", yanchor: "middle", showarrow: false, borderpad: 0, font: { size: 12, color: trace.meta.ink || trace.line?.color || trace.marker.color } });
      break;
    }
  }
  return Plotly.relayout(box, { annotations, shapes });
}

// Return a line from a mark toward the nearest side of its name; it ends a little before the name.
function leader({ x, y, left, right, top, bottom }) {
  const [endX, endY] = [Math.min(Math.max(x, left), right), Math.min(Math.max(y, top), bottom)];
  const short = 1 - 3 / Math.max(Math.hypot(endX - x, endY - y), 4);
  return [x, y, x + (endX - x) * short, y + (endY - y) * short];
}
