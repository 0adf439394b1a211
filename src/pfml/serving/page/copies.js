// Copies that the audit has found: one group at a time, side by side; which of them are left out.

import { api, attempt, element, fileName, imageUrl, indexedImage, isElsewhere, readable } from "/page/api.js";

const byId = (id) => document.getElementById(id);
const isLeftOut = (one) => one.decision?.decision === "drop";
const isDecided = (group) => group.images.some(isLeftOut);

function titleOf(group) {
  const where = [group.across_classes && "in different classes", group.across_parts && "in training and held-out images"];
  return [`${group.images.length} ${group.exact ? "exact" : "near"} copies`, ...where.filter(Boolean)].join(", ");
}

function linkedImage(one) {
  if (one.image === null) return element("span", { class: "missing" }, "not in the index");
  const link = { href: imageUrl(one.image, "full"), target: "_blank", rel: "noopener", title: "Open in full size" };
  return element("a", link, indexedImage(one.image, one.name, "large"));
}

export function start() {
  let groups = null;
  let here = 0;
  let lastChange = Promise.resolve();

  function card(one, k) {
    const verb = isLeftOut(one) ? "Take back" : "Leave out";
    const options = { class: "small", "aria-label": `${verb} ${one.name}`, onclick: () => toggle(one) };
    return element(
      "li",
      { class: `card${isLeftOut(one) ? " left-out" : ""}` },
      element("div", { class: "card-main" }, linkedImage(one)),
      element("span", { class: "card-class" }, [readable(one.class_name), one.part].filter(Boolean).join(" · ")),
      element("span", { class: "card-name", title: one.name }, fileName(one.name)),
      element("div", { class: "card-facts" }, element("button", options, verb, k < 9 ? element("kbd", {}, String(k + 1)) : null)),
    );
  }

  function listed(group, k) {
    const [first] = group.images;
    return element(
      "li",
      {},
      element(
        "button",
        { class: "queued", "data-decision": isDecided(group) ? "drop" : null, "aria-current": k === here ? "true" : null, onclick: () => go(k) },
        first.image === null ? element("span", { class: "mini missing" }, "?") : indexedImage(first.image, ""),
        element("span", { class: "queued-text" }, element("span", {}, readable(first.class_name)), element("span", { class: "quiet" }, titleOf(group))),
      ),
    );
  }

  function show() {
    const left = groups.filter((group) => !isDecided(group)).length;
    byId("copies-title").textContent = titleOf(groups[here]);
    byId("copies-images").replaceChildren(...groups[here].images.map(card));
    byId("copies-list").replaceChildren(...groups.map(listed));
    byId("copies-progress").textContent = `${groups.length - left} of ${groups.length} groups decided`;
    byId("copies-count").hidden = !left;
    byId("copies-count").textContent = left;
  }

  function go(position) {
    here = Math.max(0, Math.min(groups.length - 1, position));
    show();
  }

  // One change after the other, so that a second press finds the decision to take back.
  function toggle(one) {
    lastChange = lastChange.then(async () => {
      const done = await attempt(async () => ({ decision: await (isLeftOut(one) ? api.withdraw(one.key) : api.decide(one.key, "drop")) }));
      if (!done) return;
      one.decision = done.decision;
      show();
    });
  }

  function onKey(event) {
    if (!groups?.length || isElsewhere(event, "view-copies")) return;
    const numbered = /^[1-9]$/.test(event.key) ? groups[here].images[event.key - 1] : null;
    const actions = { j: () => go(here + 1), k: () => go(here - 1) };
    const action = numbered ? () => toggle(numbered) : actions[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    action();
  }

  async function load() {
    groups = await attempt(() => api.copies());
    if (!groups) return;
    byId("copies-body").hidden = !groups.length;
    byId("copies-empty").hidden = groups.length > 0;
    byId("copies-empty").textContent = "No copies are known: pfml audit RUN looks for them. Then reload this page.";
    if (groups.length) go(here);
  }

  document.addEventListener("keydown", onKey);
  return { changed: load, shown: (first) => first && load() };
}
