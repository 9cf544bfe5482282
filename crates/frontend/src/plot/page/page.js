// What is shown and its address, and the start of the page.

const about = JSON.parse(byId("about").textContent);
const { shape } = about;
const VIEWS = ["model", "head", "token"];
const AS = about.picture ? ["lines", "map", "picture"] : ["lines", "map"];
const state = { view: "model", layer: 0, head: 0, token: null, key: null, as: "lines" };
const layers = [];
const summaries = {};

const countOf = (side) => shape[side === "query" ? "queries" : "keys"];
const tokenText = (side, index) => ((side === "key" && about.tokens.key) || about.tokens.query)[index];
/** A token with its index, held together whatever its direction of writing. */
const named = (side, index) => (about.hasTokens[side] ? `${index} “\u2068${tokenText(side, index)}\u2069”` : `${index}`);
const counted = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
const percent = (share) => (share > 0 && share < 0.001 ? "under 0.1\u00a0%" : `${Number((100 * share).toPrecision(2))}\u00a0%`);
const capital = (text) => text[0].toUpperCase() + text.slice(1);

function headName(layer, head) {
  const { name } = about.layers[layer];
  return `layer ${layer}${name ? ` (\u2068${name}\u2069)` : ""}, head ${head}`;
}

/** A layer, read when it is first asked for. */
function layerAt(index) {
  const { hasAllWeights } = about.layers[index];
  return (layers[index] ??= new Layer(bytesOf(byId(`layer-${index}`).textContent), shape, hasAllWeights));
}

const summaryOf = (layer, head) => (summaries[[layer, head]] ??= layerAt(layer).summary(head));

/** The step of an arrow key without Shift, as rows and columns. */
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const arrow = ({ key, shiftKey }) => (shiftKey ? undefined : ARROWS[key]);

/** Changes what is shown. A move within a view replaces the address, so that Back leaves the view. */
function go(changes, isMove = false) {
  Object.assign(state, changes);
  const { view, layer, head, token, key, as } = state;
  const parts = { view: view === "token" && (token ?? key) === null ? view : null };
  if (view === "head") Object.assign(parts, { layer, head, as: as === "lines" ? null : as });
  if (view !== "model") Object.assign(parts, { token, key });
  const address = Object.entries(parts).flatMap(([name, value]) => (value === null ? [] : [`${name}=${value}`])).join("&");
  history[isMove ? "replaceState" : "pushState"](null, "", `#${address}`);
  show();
}

/** Shows what the address says, and says what of it is not of this page. */
function follow() {
  const { heads, queries, keys } = shape;
  const limits = { layer: about.layers.length, head: heads, token: queries, key: keys, view: VIEWS, as: AS };
  const { found, problems } = parseAddress(location.hash, limits);
  const view = "layer" in found || "head" in found ? "head" : "token" in found || "key" in found ? "token" : "model";
  Object.assign(state, { layer: 0, head: 0, token: null, key: null, as: "lines", view }, found);
  byId("problem").textContent = problems.length ? `The address is not of this page: ${problems.join(", ")}.` : "";
  show();
}

function show() {
  hovered = null;
  for (const view of VIEWS) {
    byId(view).hidden = view !== state.view || isEmpty;
    byId(`to-${view}`).setAttribute("aria-current", view === state.view);
  }
  if (isEmpty) return;
  // A view's tokens are made when it is first seen: there may be thousands.
  BUILD[state.view]?.();
  delete BUILD[state.view];
  if (state.view === "head") showHead();
  if (state.view === "token") showToken();
}

function useTheme(dark) {
  isDark = dark;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", dark);
  if (!isEmpty) drawModel();
  show();
}

const KEYS = {
  1: () => go({ view: "model" }),
  2: () => go({ view: "head" }),
  3: () => go({ view: "token" }),
  Escape() {
    go({ view: state.view === "token" ? "head" : "model" });
    if (state.view === "model") focusMap(byId(`map-${state.layer}-${state.head}`));
  },
  "+": () => zoom(2),
  "-": () => zoom(0.5),
};
const BUILD = { head: buildHead, token: buildToken };
const isEmpty = !shape.queries || !shape.keys;
byId("title").textContent = about.title;
byId("empty").hidden = !isEmpty;
if (!isEmpty) buildModel();
for (const view of VIEWS) on(`to-${view}`, "click", () => go({ view }));
on("theme", "click", () => useTheme(!isDark));
for (const name of ["hashchange", "popstate"]) addEventListener(name, follow);
addEventListener("resize", show);
addEventListener("keydown", (event) => {
  if (isEmpty || event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("select")) return;
  const [down, right] = ARROWS[event.key] ?? [0, 0];
  if (event.shiftKey && (down || right) && state.view === "head") moveHead(down * shape.heads + right);
  else if (event.key in KEYS) KEYS[event.key]();
  else return;
  event.preventDefault();
});
const scheme = matchMedia("(prefers-color-scheme: dark)");
scheme.addEventListener("change", ({ matches }) => useTheme(matches));
useTheme(scheme.matches);
follow();
