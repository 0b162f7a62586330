// Views by the address's fragment: #playground, #cluster, #requests, #requests/ID.

import { getJson, hasKey, onKeyRefused, setKey, setText } from "./api.js";
import { ClusterView } from "./cluster.js";
import { Playground } from "./playground.js";
import { RequestsView } from "./requests.js";

const byId = (id) => document.getElementById(id);
const views = { playground: new Playground(), cluster: new ClusterView(), requests: new RequestsView() };
const links = [...document.querySelectorAll("nav a")];
let shown = "";

function show() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  if (name === "main") return; // the link that skips the navigation
  const wanted = name in views ? name : "playground";
  if (shown && shown !== wanted) {
    byId(shown).hidden = true;
    views[shown].hide();
  }
  const isNew = shown !== wanted;
  shown = wanted;
  byId(wanted).hidden = false;
  for (const link of links) {
    if (link.hash === `#${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${byId(`${wanted}-title`).textContent} – Baton`;
  views[wanted].show(decoded(rest.join("/")), isNew);
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// --- API key ---

const dialog = byId("key-dialog");

function askForKey(text) {
  setText(byId("key-message"), text);
  byId("key-button").hidden = false;
  if (!dialog.open) dialog.showModal();
}

function useKey(value) {
  setKey(value);
  byId("key").value = "";
  dialog.close();
  views[shown].show(decoded(location.hash.split("/").slice(1).join("/")), true);
}

onKeyRefused(() => {
  askForKey(hasKey() ? "The router does not accept this API key." : "This router asks for an API key.");
});
byId("key-button").addEventListener("click", () => askForKey(""));
byId("key-cancel").addEventListener("click", () => dialog.close());
byId("key-forget").addEventListener("click", () => useKey(""));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const value = byId("key").value.trim();
  if (!value) setText(byId("key-message"), "Enter a key.");
  // A header is Latin-1 at most: fetch would throw on anything else.
  else if (/[^\x21-\x7e]/.test(value)) setText(byId("key-message"), "A key has no spaces and only ASCII characters.");
  else useKey(value);
});
if (hasKey()) byId("key-button").hidden = false;

// --- theme ---

const THEMES = ["", "light", "dark"];

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  setText(byId("theme-button"), `Theme: ${theme || "system"}`);
  views.playground.redraw();
}

byId("theme-button").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || "";
  const theme = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  try {
    localStorage.setItem("baton.theme", theme);
  } catch {
    // storage is turned off: the theme lasts until the page is loaded again
  }
  setTheme(theme);
});
setTheme(document.documentElement.dataset.theme || "");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => views.playground.redraw());

getJson("version", AbortSignal.timeout(10000)).then(
  ({ version }) => setText(byId("version"), version),
  () => {}, // the view says that the router cannot be reached
);
addEventListener("hashchange", show);
show();
