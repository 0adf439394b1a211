// The views: every section.view of index.html, with a tab and the script /page/NAME.js.

import { api, attempt, clearToasts, element } from "/page/api.js";
import { editing } from "/page/edits.js";

const POLL_INTERVAL = 10000; // milliseconds
const sections = [...document.querySelectorAll("section.view")];
const views = sections.map((section) => section.id.replace("view-", ""));
const started = {};
const visited = new Set();
let shownView = null;
let context = null;

function addTab(section, view) {
  const count = element("span", { id: `${view}-count`, class: "count", hidden: true });
  const options = { role: "tab", id: `tab-${view}`, "aria-controls": section.id, "data-view": view, onclick: () => show(view) };
  document.querySelector(".tabs").append(element("button", options, `${section.dataset.title} `, count));
  section.setAttribute("role", "tabpanel");
  section.setAttribute("aria-labelledby", `tab-${view}`);
}

function show(name) {
  const chosen = views.includes(name) ? name : views[0];
  for (const view of views) {
    const tab = document.getElementById(`tab-${view}`);
    document.getElementById(`view-${view}`).hidden = view !== chosen;
    tab.setAttribute("aria-selected", String(view === chosen));
    tab.tabIndex = view === chosen ? 0 : -1;
  }
  if (location.hash.slice(1) !== chosen) history.replaceState(null, "", `#${chosen}`);
  if (shownView !== null && shownView !== chosen) clearToasts();
  shownView = chosen;
  const first = !visited.has(chosen);
  visited.add(chosen);
  started[chosen].shown(first);
}

// Shows what is wrong with the files of the index, as long as it is.
function showProblem(problem) {
  const banner = document.getElementById("problem");
  banner.hidden = !problem;
  if (banner.textContent !== (problem ?? "")) banner.textContent = problem ?? "";
}

async function pollIndex() {
  if (document.hidden) return;
  const answer = await api.ready().catch(() => null); // the next action reports a server that does not answer
  if (answer && "problem" in answer) showProblem(answer.problem);
  if (!answer?.ready) return;
  const status = await api.status({ quiet: true }).catch(() => null);
  if (!status || context.edits.isPending()) return;
  if (status.generation !== context.status.generation) await changed(null); // another page or pfml index has changed it
}

// Shows all views again after an edit; `renamed` is {from, to} if images have come from one class to another.
async function changed(renamed) {
  const found = await attempt(() => Promise.all([api.status(), api.classes()]));
  if (!found) return;
  const [status, classes] = found;
  Object.assign(context.status, status);
  context.classes.splice(0, context.classes.length, ...classes);
  context.showFacts(status.threshold);
  await Promise.all([...visited].map((view) => started[view].changed?.(renamed)));
}

function onTabKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = views[(views.indexOf(event.target.dataset.view) + step + views.length) % views.length];
  show(next);
  document.getElementById(`tab-${next}`).focus();
}

async function begin() {
  sections.forEach((section, k) => addTab(section, views[k]));
  const scripts = Promise.all(views.map((view) => import(`/page/${view}.js`)));
  const [status, classes] = await Promise.all([api.status(), api.classes()]);
  document.title = `${status.run} · pfml`;
  document.getElementById("run-name").textContent = status.run;
  const count = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
  // The threshold of the latest response: pfml calibrate may write another one while the page is open.
  const showFacts = (threshold) => {
    const facts = [count(status.images, "image", "images"), count(status.classes, "class", "classes")];
    if (threshold) facts.push(`${(100 * threshold.false_accepts.value).toFixed(1)} % false accepts measured${threshold.is_measured ? "" : " before a merge: run pfml calibrate"}`);
    document.getElementById("run-facts").textContent = facts.join(" · ");
  };
  showFacts(status.threshold);
  showProblem(status.problem);
  const searchByImage = (image) => {
    show("search");
    started.search.byImage(image);
  };
  const openClass = (name) => {
    show("classes");
    started.classes.open(name);
  };
  context = { status, classes, edits: editing(classes, changed), show, showFacts, searchByImage, openClass };
  setInterval(pollIndex, POLL_INTERVAL);
  document.addEventListener("visibilitychange", pollIndex);
  (await scripts).forEach((script, k) => (started[views[k]] = script.start(context)));
  document.querySelector(".tabs").addEventListener("keydown", onTabKey);
  addEventListener("hashchange", () => show(location.hash.slice(1)));
  show(location.hash.slice(1));
  document.body.dataset.ready = "yes";
}

attempt(begin);
