// The map of the embedding in three layers: the potential of a class, points, and stars, names and rings above them.

import { api, attempt, classColor, element, imageUrl, readable } from "/page/api.js";
import { colorsBy } from "/page/colors.js";
import { fitted, pointLayer } from "/page/points.js";
import { selecting } from "/page/selection.js";

const byId = (id) => document.getElementById(id);
const SMALLEST = 0.8;
const LARGEST = 60;
const NEAR = 14; // pixels
const ABOVE = 48; // pixels of a name above the middle of its class, at most

// The middle of each class, the median of its images, which stragglers do not move; and how high nine of ten lie.
function centersOf(map) {
  const members = new Map();
  map.labels.forEach((label, k) => {
    if (label >= 0 && !members.get(label)?.push(k)) members.set(label, [k]);
  });
  const quantile = (values, part) => values.sort((a, b) => a - b)[Math.floor(values.length * part)];
  const center = ([label, rows]) => {
    const [xs, ys] = [rows.map((k) => map.x[k]), rows.map((k) => map.y[k])];
    return { label, size: rows.length, x: quantile(xs, 0.5), y: quantile(ys, 0.5), high: quantile(ys, 0.9) };
  };
  return [...members]
    .map(center)
    .sort((a, b) => b.size - a.size);
}

// Positions of the points in a polygon, by how often a ray from a point crosses its sides.
function within(corners, places) {
  const [xs, ys] = [corners.map(([x]) => x), corners.map(([, y]) => y)];
  const [left, right, bottom, top] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const inside = [];
  for (let k = 0; k < places.length / 2; k += 1) {
    const [x, y] = [places[2 * k], places[2 * k + 1]];
    if (x < left || x > right || y < bottom || y > top) continue;
    let isIn = false;
    for (let i = 0, j = xs.length - 1; i < xs.length; j = i++) {
      if (ys[i] > y !== ys[j] > y && x < ((xs[j] - xs[i]) * (y - ys[i])) / (ys[j] - ys[i]) + xs[i]) isIn = !isIn;
    }
    if (isIn) inside.push(k);
  }
  return inside;
}

export function start({ status, classes, edits, searchByImage }) {
  const canvas = byId("map-canvas");
  const pen = canvas.getContext("2d");
  const under = byId("map-field").getContext("2d");
  const tip = byId("map-tip");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const view = { x: 0.5, y: 0.5, zoom: 1 };
  let data = null;
  let field = null; // the potential as an image
  let chosen = -1;
  let found = -1; // the class that was looked for
  let centers = [];
  let suspects = null; // ids of the images that the audit suspects, once they are asked for
  let hovered = -1;
  let lasso = []; // the corners so far, on the screen
  let drawing = 0;

  const redraw = () => (drawing ||= requestAnimationFrame(draw));
  const points = pointLayer(byId("map-points"), redraw);
  canvas.dataset.drawnBy = points.kind;
  const coloring = colorsBy(() => paint());
  const selection = selecting({ edits, classes, changed: () => paint() });

  // The plane is stretched to the frame: the axes of the map have no unit.
  const toScreen = (x, y) => [
    ((x - view.x) * view.zoom + 0.5) * canvas.clientWidth,
    ((view.y - y) * view.zoom + 0.5) * canvas.clientHeight,
  ];
  const toPlane = (left, top) => [
    (left / canvas.clientWidth - 0.5) / view.zoom + view.x,
    view.y - (top / canvas.clientHeight - 0.5) / view.zoom,
  ];
  const shownClass = () => (found >= 0 ? found : chosen);

  // Colors of all points, and which are on top: those of the class that is shown, and selected ones.
  function paint() {
    if (!data) return;
    const [count, shown, some] = [data.ids.length, shownClass(), selection.ids];
    const colors = new Uint8Array(4 * count);
    const emphasis = new Uint8Array(count);
    const faint = some.size || found >= 0 ? 0.15 : 0.45;
    for (let k = 0; k < count; k += 1) {
      const stands = some.size ? some.has(data.ids[k]) : shown >= 0 && data.labels[k] === shown;
      emphasis[k] = stands ? 1 : 0;
      colors.set(coloring.rgb(k, data.labels[k]), 4 * k);
      colors[4 * k + 3] = 255 * (stands || (shown < 0 && !some.size) ? 0.9 : faint);
    }
    const order = Uint32Array.from(data.labels, (_, k) => k);
    order.sort((a, b) => emphasis[a] - emphasis[b] || a - b);
    points.set({ places: data.places, colors, emphasis, order });
    canvas.dataset.selected = String(some.size);
    redraw();
  }

  function star(left, top, radius) {
    pen.beginPath();
    for (let k = 0; k < 10; k += 1) {
      const size = k % 2 ? radius * 0.45 : radius;
      const angle = (k * Math.PI) / 5 - Math.PI / 2;
      pen.lineTo(left + size * Math.cos(angle), top + size * Math.sin(angle));
    }
    pen.closePath();
  }

  function drawField() {
    const density = fitted(under.canvas);
    under.setTransform(density, 0, 0, density, 0, 0);
    under.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    if (!field) return;
    const [left, top] = toScreen(field.low, field.high);
    const size = view.zoom * (field.high - field.low);
    under.imageSmoothingEnabled = true;
    under.imageSmoothingQuality = "high";
    under.drawImage(field.image, left, top, size * canvas.clientWidth, size * canvas.clientHeight);
  }

  // Smaller for many points, so that they can be told apart.
  function radius() {
    const crowd = data.ids.length > 30000 ? 0.5 : data.ids.length > 2500 ? 0.8 : 1.15;
    return Math.min(7, 2.6 + 1.2 * Math.log2(Math.max(1, view.zoom))) * crowd;
  }

  function drawSuspects(color) {
    if (!suspects || !byId("map-suspects").checked) return;
    pen.strokeStyle = color;
    pen.lineWidth = 2;
    for (let k = 0; k < data.ids.length; k += 1) {
      if (!suspects.has(data.ids[k])) continue;
      pen.beginPath();
      pen.arc(...toScreen(data.x[k], data.y[k]), 7, 0, 2 * Math.PI);
      pen.stroke();
    }
  }

  function drawLasso(ink) {
    if (lasso.length < 2) return;
    pen.beginPath();
    for (const [left, top] of lasso) pen.lineTo(left, top);
    pen.closePath();
    pen.strokeStyle = ink;
    pen.lineWidth = 1.5;
    pen.setLineDash([5, 4]);
    pen.stroke();
    pen.setLineDash([]);
    pen.globalAlpha = 0.08;
    pen.fillStyle = ink;
    pen.fill();
    pen.globalAlpha = 1;
  }

  // The names of classes above their images, as far as they do not overlap; the larger classes first.
  function drawNames(ink, paper) {
    if (!coloring.areNamesNeeded()) return; // the legend has them
    const taken = [];
    pen.font = "600 12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.lineJoin = "round";
    const shown = shownClass();
    const first = centers.filter((one) => one.label === shown);
    for (const one of [...first, ...centers.filter((each) => each.label !== shown)]) {
      const [left, middle] = toScreen(one.x, one.y);
      const top = Math.max(toScreen(one.x, one.high)[1] - 14, middle - ABOVE, 12);
      const name = readable(data.class_names[one.label]);
      const half = pen.measureText(name).width / 2 + 4;
      const box = [left - half, top - 9, left + half, top + 9];
      if (box[2] < 0 || box[0] > canvas.clientWidth || middle < 0 || middle > canvas.clientHeight) continue;
      if (taken.some((other) => box[0] < other[2] && box[2] > other[0] && box[1] < other[3] && box[3] > other[1])) continue;
      taken.push(box);
      pen.globalAlpha = shown < 0 || one.label === shown ? 1 : 0.45;
      pen.strokeStyle = paper;
      pen.lineWidth = 4;
      pen.strokeText(name, left, top);
      pen.fillStyle = ink;
      pen.fillText(name, left, top);
    }
    pen.globalAlpha = 1;
    canvas.dataset.names = String(taken.length);
  }

  function drawProxies(ink, paper) {
    if (!byId("map-proxies").checked) return;
    const shown = shownClass();
    const radius = Math.min(13, 6 + Math.log2(Math.max(1, view.zoom)));
    for (let k = 0; k < data.proxy_x.length; k += 1) {
      const label = data.proxy_labels[k];
      const [left, top] = toScreen(data.proxy_x[k], data.proxy_y[k]);
      pen.globalAlpha = shown < 0 || label === shown ? 1 : 0.35;
      star(left, top, label === shown ? radius * 1.5 : radius);
      pen.fillStyle = classColor(label);
      pen.fill();
      pen.strokeStyle = label === shown ? ink : paper;
      pen.lineWidth = 1.2;
      pen.stroke();
    }
    pen.globalAlpha = 1;
  }

  function draw() {
    drawing = 0;
    const density = fitted(canvas);
    if (!density) return;
    const styles = getComputedStyle(document.documentElement);
    const [ink, paper, warning] = ["--ink", "--card", "--push"].map((name) => styles.getPropertyValue(name).trim());
    pen.setTransform(density, 0, 0, density, 0, 0);
    pen.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    if (!data) return;
    drawField();
    points.draw(view, radius(), paper);
    drawProxies(ink, paper);
    drawSuspects(warning);
    drawNames(ink, paper);
    drawLasso(ink);
    if (hovered >= 0) {
      const [left, top] = toScreen(data.x[hovered], data.y[hovered]);
      pen.strokeStyle = ink;
      pen.lineWidth = 2;
      pen.beginPath();
      pen.arc(left, top, 9, 0, 2 * Math.PI);
      pen.stroke();
    }
    canvas.dataset.drawn = String(data.ids.length);
    canvas.dataset.frames = String(Number(canvas.dataset.frames ?? 0) + 1);
  }

  function nearest(left, top, within) {
    let best = -1;
    let least = within * within;
    const [x, y] = toPlane(left, top);
    const [width, height] = [canvas.clientWidth * view.zoom, canvas.clientHeight * view.zoom];
    for (let k = 0; data && k < data.ids.length; k += 1) {
      const distance = ((data.x[k] - x) * width) ** 2 + ((data.y[k] - y) * height) ** 2;
      if (distance < least) [best, least] = [k, distance];
    }
    return best;
  }

  function hover(point) {
    if (point === hovered) return;
    hovered = point;
    tip.hidden = point < 0;
    canvas.classList.toggle("pointing", point >= 0);
    if (point >= 0) {
      const [left, top] = toScreen(data.x[point], data.y[point]);
      const name = data.labels[point] < 0 ? "" : data.class_names[data.labels[point]];
      tip.querySelector("img").src = imageUrl(data.ids[point]);
      tip.querySelector("p").textContent = readable(name);
      tip.style.left = `${Math.min(Math.max(left + 14, 4), canvas.clientWidth - 148)}px`;
      tip.style.top = `${top > canvas.clientHeight - 190 ? Math.max(4, top - 178) : top + 14}px`;
    }
    redraw();
  }

  function searchBy(point) {
    const label = data.labels[point];
    const name = label < 0 ? "" : data.class_names[label];
    searchByImage({ id: data.ids[point], name: `image ${data.ids[point]}`, class_name: name });
  }

  function zoomAt(left, top, factor) {
    const [x, y] = toPlane(left, top);
    view.zoom = Math.min(LARGEST, Math.max(SMALLEST, view.zoom * factor));
    const [newX, newY] = toPlane(left, top);
    view.x += x - newX;
    view.y += y - newY;
    hover(-1);
    redraw();
  }

  const zoomCenter = (factor) => zoomAt(canvas.clientWidth / 2, canvas.clientHeight / 2, factor);

  // Fits the whole map into the frame.
  function reset() {
    Object.assign(view, { x: 0.5, y: 0.5, zoom: 1 });
    const [x, y] = data ? [data.x.concat(data.proxy_x), data.y.concat(data.proxy_y)] : [[], []];
    if (x.length > 1) {
      const range = (values) => values.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [1, 0]);
      const [[left, right], [bottom, top]] = [range(x), range(y)];
      const fits = [1 / (right - left + 0.05), 1 / (top - bottom + 0.05)];
      Object.assign(view, { x: (left + right) / 2, y: (top + bottom) / 2, zoom: Math.min(2.5, ...fits) });
    }
    hover(-1);
    redraw();
  }

  // Selects what the lasso goes around; with Shift also what was selected before, with Alt that without it.
  function close(event) {
    const corners = lasso.map(([left, top]) => toPlane(left, top));
    lasso = [];
    selection.take(within(corners, data.places).map((k) => data.ids[k]), event.shiftKey ? "add" : event.altKey ? "remove" : "only");
  }

  function selectView() {
    const corners = [[0, 0], [1, 0], [1, 1], [0, 1]].map(([x, y]) => toPlane(x * canvas.clientWidth, y * canvas.clientHeight));
    selection.take(within(corners, data.places).map((k) => data.ids[k]), "only");
  }

  function listenToPointers() {
    const pointers = new Map();
    let moved = 0;
    const position = (event) => [event.offsetX, event.offsetY];
    const selects = (event) => byId("map-lasso").getAttribute("aria-pressed") === "true" || event.shiftKey;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, position(event));
      if (pointers.size === 1) moved = 0;
      lasso = data && pointers.size === 1 && selects(event) ? [position(event)] : [];
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      const [left, top] = position(event);
      if (!before) return hover(nearest(left, top, NEAR));
      const others = [...pointers].filter(([id]) => id !== event.pointerId);
      moved += Math.abs(left - before[0]) + Math.abs(top - before[1]);
      if (lasso.length && !others.length) {
        lasso.push([left, top]);
        hover(-1);
        redraw();
      } else if (others.length === 1) {
        lasso = [];
        const [, [x, y]] = others[0];
        const size = (a) => Math.hypot(a[0] - x, a[1] - y) || 1;
        zoomAt((left + x) / 2, (top + y) / 2, size([left, top]) / size(before));
      } else if (moved > 3) {
        view.x -= (left - before[0]) / (canvas.clientWidth * view.zoom);
        view.y += (top - before[1]) / (canvas.clientHeight * view.zoom);
        hover(-1);
        redraw();
      }
      pointers.set(event.pointerId, [left, top]);
    });
    const up = (event) => {
      const alone = pointers.size === 1;
      const drawn = lasso.length > 0;
      pointers.delete(event.pointerId);
      if (event.type !== "pointerup" || !alone) lasso = [];
      else if (drawn && moved > 3) close(event);
      else if (moved <= 3) {
        lasso = [];
        const point = nearest(...position(event), event.pointerType === "touch" ? 22 : NEAR);
        if (point >= 0) drawn ? selection.toggle(data.ids[point]) : searchBy(point);
      }
      redraw();
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => hover(-1));
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        zoomAt(event.offsetX, event.offsetY, Math.exp(-Math.max(-120, Math.min(120, event.deltaY)) * 0.0022));
      },
      { passive: false },
    );
  }

  function onKey(event) {
    const step = 0.12 / view.zoom;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] };
    if (moves[event.key]) {
      view.x += moves[event.key][0];
      view.y += moves[event.key][1];
    } else if (event.key === "+" || event.key === "=") zoomCenter(1.4);
    else if (event.key === "-") zoomCenter(1 / 1.4);
    else if (event.key === "0") reset();
    else if (event.key === "Enter" && hovered >= 0) return searchBy(hovered);
    else if (event.key === " ") {
      if (hovered >= 0) selection.toggle(data.ids[hovered]);
      return event.preventDefault();
    } else if (event.key.toLowerCase() === "v") return selectView();
    else if (event.key === "Escape") return selection.clear();
    else return;
    event.preventDefault();
    hover(-1);
    hover(nearest(canvas.clientWidth / 2, canvas.clientHeight / 2, 400));
    redraw();
  }

  async function showPotential() {
    const name = byId("map-class").value;
    chosen = data && name ? data.class_names.indexOf(name) : -1;
    field = null;
    byId("map-legend").hidden = !name;
    byId("map-explanation").textContent = "";
    paint();
    if (!name) return delete canvas.dataset.potential;
    const answer = await attempt(() => api.potential(name));
    if (!answer || byId("map-class").value !== name) return;
    field = { image: imageOfField(answer), low: answer.low, high: answer.high };
    byId("map-explanation").textContent = answer.explanation;
    canvas.dataset.potential = name;
    redraw();
  }

  // Highlights the class whose name is typed, or the only one that begins so.
  function find() {
    const text = byId("map-find").value.trim().toLowerCase();
    const names = (data?.class_names ?? []).map((name) => name.toLowerCase());
    const begins = text ? names.filter((name) => name.startsWith(text)) : [];
    found = names.includes(text) ? names.indexOf(text) : begins.length === 1 ? names.indexOf(begins[0]) : -1;
    if (found >= 0) canvas.dataset.found = data.class_names[found];
    else delete canvas.dataset.found;
    paint();
  }

  async function showSuspects() {
    if (!suspects) {
      const queue = await attempt(() => api.audit());
      if (!queue) return;
      const indexed = queue.suspects.filter((one) => one.image !== null);
      const listed = indexed.filter((one) => one.listed); // none if the audit could not estimate how many are wrong
      suspects = new Set((listed.length ? listed : indexed).map((one) => one.image));
    }
    canvas.dataset.suspects = String(byId("map-suspects").checked ? suspects.size : 0);
    redraw();
  }

  function imageOfField(answer) {
    const made = element("canvas", { width: answer.side, height: answer.side });
    const inside = made.getContext("2d");
    const pixels = inside.createImageData(answer.side, answer.side);
    const colors = dark.matches ? [[96, 150, 255], [255, 110, 110]] : [[38, 92, 220], [214, 48, 49]];
    answer.values.forEach((value, k) => {
      const color = colors[value < 0 ? 0 : 1];
      pixels.data.set([...color, Math.round(150 * Math.abs(value))], 4 * k);
    });
    inside.putImageData(pixels, 0, 0);
    return made;
  }

  function empty(message) {
    byId("map-empty").hidden = !message;
    byId("map-empty").textContent = message;
  }

  // Loads the map; `stay` keeps what the frame shows, if it has shown a map before.
  async function load(stay = false) {
    const answer = await attempt(() => api.map());
    if (!answer) return empty("The map could not be computed; the message says why.");
    if (answer.state === "computing") {
      empty("Computing the map …");
      setTimeout(load, 1200);
      return;
    }
    const isFirst = !data;
    data = answer;
    data.places = Float32Array.from({ length: 2 * data.ids.length }, (_, k) => (k % 2 ? data.y : data.x)[k >> 1]);
    selection.keep(new Set(data.ids));
    await coloring.load(data);
    empty(data.ids.length ? "" : "The index is empty: pfml index RUN FOLDER adds images.");
    const subsample = data.ids.length < data.images ? `${data.ids.length.toLocaleString("en")} of ` : "";
    const method = { tsne: "t-SNE", umap: "UMAP", pca: "PCA" }[data.method] ?? data.method;
    const proxies = data.proxy_x.length;
    byId("map-note").textContent = `${method} of ${subsample}${data.images.toLocaleString("en")} images${proxies ? `, ${proxies} proxies` : ""}`;
    byId("map-proxies-label").hidden = !proxies;
    centers = centersOf(data);
    hovered = -1;
    tip.hidden = true;
    if (isFirst || !stay) reset();
    find();
  }

  function fillNames() {
    const none = byId("map-class").firstElementChild;
    byId("map-class").replaceChildren(none, ...classes.map((one) => element("option", { value: one.name }, one.name)));
    byId("map-names").replaceChildren(...classes.map((one) => element("option", { value: one.name })));
  }

  // The same view of the map, by the names that classes have now.
  async function changed(renamed) {
    const name = byId("map-class").value;
    fillNames();
    byId("map-class").value = name === renamed?.from ? renamed.to : name;
    if (byId("map-class").selectedIndex < 0) byId("map-class").selectedIndex = 0;
    suspects = null;
    byId("map-suspects-label").hidden = !status.suspects;
    await load(true);
    if (byId("map-suspects").checked) await showSuspects();
    await showPotential();
  }

  fillNames();
  byId("map-class").addEventListener("change", showPotential);
  byId("map-find").addEventListener("input", find);
  byId("map-suspects-label").hidden = !status.suspects;
  byId("map-suspects").addEventListener("change", showSuspects);
  byId("map-proxies").addEventListener("change", redraw);
  byId("map-in").addEventListener("click", () => zoomCenter(1.5));
  byId("map-out").addEventListener("click", () => zoomCenter(1 / 1.5));
  byId("map-reset").addEventListener("click", reset);
  canvas.addEventListener("keydown", onKey);
  canvas.addEventListener("blur", () => hover(-1));
  listenToPointers();
  new ResizeObserver(redraw).observe(canvas);
  dark.addEventListener("change", showPotential);
  byId("map-lasso").addEventListener("click", (event) => {
    const isOn = event.currentTarget.getAttribute("aria-pressed") !== "true";
    event.currentTarget.setAttribute("aria-pressed", String(isOn));
    canvas.classList.toggle("lasso", isOn);
  });

  return { changed, shown: (first) => (first ? load() : redraw()) };
}
