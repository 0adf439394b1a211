// The colors of the classes on the map, if they are few.

import { classColor, element, readable } from "/page/api.js";

const MOST = 12; // of more classes, the colors are too alike to tell apart

// Fills a list with the classes that points or stars of the map have; hides it if they are many, or none.
export function showClasses(list, map) {
  const labels = [...new Set([...map.labels, ...map.proxy_labels])].sort((a, b) => a - b);
  list.hidden = labels.length > MOST || labels.length === 0;
  if (list.hidden) return list.replaceChildren();
  const entries = labels.map((label) => {
    const name = readable(map.class_names[label]);
    const color = element("i", { "aria-hidden": "true" });
    color.style.setProperty("--color", classColor(label));
    return element("li", { title: name }, color, element("span", {}, name));
  });
  return list.replaceChildren(...entries);
}
