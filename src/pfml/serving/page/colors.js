// What the colors of the map mean: classes, or a column of the metadata, with a legend of it.

import { api, attempt, classColor, element, readable } from "/page/api.js";
import { rgbOf } from "/page/points.js";

const byId = (id) => document.getElementById(id);
const MOST_NAMED = 12; // the colors of more are too similar to be told apart
const GRAY = [140, 140, 140]; // no value
const SCALE = [[59, 76, 192], [126, 78, 190], [204, 71, 134], [240, 120, 60], [232, 180, 40]]; // from low to high

// The color at a share of the way from low to high.
function onScale(share) {
  const place = Math.min(Math.max(share, 0), 1) * (SCALE.length - 1);
  const k = Math.min(Math.floor(place), SCALE.length - 2);
  return SCALE[k].map((value, channel) => Math.round(value + (place - k) * (SCALE[k + 1][channel] - value)));
}

function swatch(color, name) {
  const mark = element("i", { "aria-hidden": "true" });
  mark.style.setProperty("--color", color);
  return element("li", { title: name }, mark, element("span", {}, name));
}

// Colors of points; `changed` is called when others are chosen.
export function colorsBy(changed) {
  const chooser = byId("map-color");
  const legend = byId("map-classes");
  let column = null; // {kind, values, names, low, high}: what the server says of the chosen column; null for classes
  let data = null;
  let isListed = false; // whether the legend has the classes

  function showClasses() {
    const labels = [...new Set(data.labels.concat(data.proxy_labels))].sort((a, b) => a - b);
    isListed = labels.length > 0 && labels.length <= MOST_NAMED;
    legend.setAttribute("aria-label", "Colors of the classes");
    legend.replaceChildren(...(isListed ? labels.map((label) => swatch(classColor(label), readable(data.class_names[label]))) : []));
  }

  function showScale() {
    const bar = element("i", { class: "scale", "aria-hidden": "true" });
    bar.style.setProperty("--scale", SCALE.map((color) => `rgb(${color})`).join(", "));
    legend.replaceChildren(element("li", {}, element("span", {}, column.low_text), bar, element("span", {}, column.high_text)));
  }

  function showNames() {
    const named = column.names.slice(0, MOST_NAMED).map((name, k) => swatch(classColor(k), name));
    const rest = column.names.length - named.length;
    if (rest > 0) named.push(element("li", {}, element("span", {}, `and ${rest.toLocaleString("en")} more`)));
    legend.replaceChildren(...named);
  }

  function showLegend() {
    if (!column) showClasses();
    else {
      isListed = false;
      legend.setAttribute("aria-label", `Colors by ${chooser.value}`);
      if (column.kind === "text") showNames();
      else showScale();
      if (column.values.includes(null)) legend.append(swatch(`rgb(${GRAY})`, "no value"));
    }
    legend.hidden = !legend.children.length;
    legend.dataset.by = chooser.value;
  }

  async function choose() {
    const name = chooser.value;
    const answer = name ? await attempt(() => api.mapValues(name)) : null;
    if (chooser.value !== name) return;
    if (name && !answer) chooser.value = "";
    // a map of another state of the index has other points: the next poll of the index shows both
    column = answer && answer.values.length === data.ids.length ? answer : null;
    showLegend();
    changed();
  }

  chooser.addEventListener("change", choose);
  return {
    // Whether the classes have no place in the legend, so that their names stand on the map.
    areNamesNeeded: () => !isListed,
    rgb(k, label) {
      if (!column) return rgbOf(classColor(label));
      const value = column.values[k];
      if (value === null) return GRAY;
      if (column.kind === "text") return rgbOf(classColor(value));
      return onScale(column.high > column.low ? (value - column.low) / (column.high - column.low) : 0.5);
    },
    // Takes a new map, with the column that was chosen if the index still has it.
    async load(map) {
      data = map;
      const before = chooser.value;
      const names = map.columns ?? [];
      chooser.replaceChildren(element("option", { value: "" }, "class"), ...names.map((name) => element("option", { value: name }, name)));
      byId("map-color-field").hidden = !names.length;
      chooser.value = names.includes(before) ? before : "";
      await choose();
    },
  };
}
