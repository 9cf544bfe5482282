// What is shown and its address, and the start of the page.

const about = JSON.parse(byId("about").textContent);
const { shape } = about;
const state = { view: "model", layer: 0, head: 0, token: null, key: null, as: "lines" };
const VIEWS = ["model", "head", "token"];

const tokensOf = (side) => (side === "key" && about.tokens.key) || about.tokens.query;
const hasTokens = (side) => about.hasTokens[side];
const tokenText = (side, index) => (hasTokens(side) ? tokensOf(side)[index] : `${index}`);
/** A token with its index, held together whatever its direction of writing. */
const named = (side, index) => (hasTokens(side) ? `${index} “\u2068${tokensOf(side)[index]}\u2069”` : `${index}`);
const counted = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
const capital = (text) => text[0].toUpperCase() + text.slice(1);

function headName(layer, head) {
  const { name } = about.layers[layer];
  return `layer ${layer}${name && name !== `${layer}` ? ` (\u2068${name}\u2069)` : ""}, head ${head}`;
}

const layers = [];
/** A layer, read when it is first asked for. */
function layerAt(index) {
  layers[index] ??= new Layer(bytesOf(byId(`layer-${index}`).textContent), shape, about.layers[index].hasAllWeights);
  return layers[index];
}

const summaries = new Map();
function summaryOf(layer, head) {
  const at = layer * shape.heads + head;
  if (!summaries.has(at)) summaries.set(at, layerAt(layer).summary(head));
  return summaries.get(at);
}

/** The step of an arrow key without Shift, as rows and columns. */
function arrow({ key, shiftKey }) {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  return shiftKey ? undefined : steps[key];
}

/** Changes what is shown. A move within a view replaces the address; others can be gone back from. */
function go(changes, isMove = false) {
  Object.assign(state, changes);
  hovered = null;
  history[isMove ? "replaceState" : "pushState"](null, "", address());
  show();
}

function address() {
  const { view, layer, head, token, key, as } = state;
  const parts = [];
  if (view === "head") parts.push(`layer=${layer}`, `head=${head}`);
  if (view !== "model" && token !== null) parts.push(`token=${token}`);
  if (view !== "model" && key !== null) parts.push(`key=${key}`);
  if (view === "head" && as !== "lines") parts.push(`as=${as}`);
  if (view === "token" && token === null && key === null) parts.push("view=token");
  return `#${parts.join("&")}`;
}

/** Shows what the address says, and says what it cannot. */
function follow() {
  const limits = {
    layer: about.layers.length, head: shape.heads, token: shape.queries, key: shape.keys, view: VIEWS,
    as: about.picture ? ["lines", "map", "picture"] : ["lines", "map"],
  };
  const { found, problems } = parseAddress(location.hash, limits);
  const isHead = "layer" in found || "head" in found;
  const isToken = "token" in found || "key" in found;
  Object.assign(state, { token: null, key: null, as: "lines", view: isHead ? "head" : isToken ? "token" : "model" }, found);
  hovered = null;
  byId("problem").hidden = !problems.length;
  byId("problem").textContent = problems.length ? `The address is not of this page: ${problems.join("; ")}.` : "";
  show();
}

function show() {
  for (const view of VIEWS) {
    byId(view).hidden = view !== state.view || isEmpty;
    if (view === state.view) byId(`to-${view}`).setAttribute("aria-current", "page");
    else byId(`to-${view}`).removeAttribute("aria-current");
  }
  if (isEmpty) return;
  if (state.view === "head") showHead();
  if (state.view === "token") showToken();
}

function useTheme(dark) {
  isDark = dark;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", dark);
  if (isEmpty) return;
  for (const id of ["map", "by-head"]) byId(id).image = null;
  drawModel();
  show();
}

const KEYS = {
  1: () => go({ view: "model" }),
  2: () => go({ view: "head" }),
  3: () => go({ view: "token" }),
  Escape: () => {
    const above = { token: "head", head: "model" }[state.view];
    if (above) go({ view: above });
    if (above === "model") focusMap(state.layer, state.head);
  },
  "+": () => state.view === "head" && state.as === "map" && zoom(2),
  "-": () => state.view === "head" && state.as === "map" && zoom(0.5),
};

const isEmpty = !shape.queries || !shape.keys;
byId("title").textContent = about.title;
byId("empty").hidden = !isEmpty;
if (isEmpty) {
  byId("empty").textContent = `There is nothing to see: ${counted(shape.queries, "query", "queries")} and ${counted(shape.keys, "key")}.`;
} else {
  buildModel();
  buildHead();
  buildToken();
}
for (const view of VIEWS) byId(`to-${view}`).addEventListener("click", () => go({ view }));
byId("theme").addEventListener("click", () => useTheme(!isDark));
addEventListener("hashchange", follow);
addEventListener("popstate", follow);
addEventListener("resize", show);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("select, input")) return;
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -shape.heads, ArrowDown: shape.heads };
  if (event.shiftKey && event.key in steps && state.view === "head") moveHead(steps[event.key]);
  else if (event.key in KEYS) KEYS[event.key]();
  else return;
  event.preventDefault();
});
const scheme = matchMedia("(prefers-color-scheme: dark)");
scheme.addEventListener("change", ({ matches }) => useTheme(matches));
useTheme(scheme.matches);
follow();
