// The data of the page, the current view, its address, the keyboard, and the start.

const VIEWS = ["model", "head", "token"];
const START = { view: "model", layer: 0, head: 0, query: null, key: null, as: "lines", zoom: 1 };
const about = JSON.parse(byId("about").textContent);
const { shape } = about;
const isEmpty = !shape.queries || !shape.keys;
const tokens = { query: about.tokens.query, key: about.tokens.key ?? about.tokens.query };
const FORMS = about.picture ? ["lines", "map", "picture"] : ["lines", "map"]; // the forms of the view of a head
const state = { ...START };
const layers = [];
const summaries = {};

/** A layer, decoded when it is first needed. */
const layerAt = (index) => (layers[index] ??=
  new Layer(bytesOfBase64(byId(`layer-${index}`).textContent), shape, about.layers[index].hasAllWeights));
/** The sum over queries of a key's weight in a head. */
const receivedBy = (layer, head, key) => layerAt(layer).received[head * shape.keys + key];
const summaryOf = (layer, head) => (summaries[[layer, head]] ??= layerAt(layer).summary(head));

/** A token with its index, kept together in every direction of writing. */
const tokenName = (side, index) => (about.hasTokens[side] ? `${index} “\u2068${tokens[side][index]}\u2069”` : `${index}`);
const counted = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
const percent = (share) => (share > 0 && share < 0.001 ? "under 0.1\u00a0%" : `${Number((100 * share).toPrecision(2))}\u00a0%`);
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const layerName = (layer) => `layer ${layer}${about.layers[layer].name && ` (\u2068${about.layers[layer].name}\u2069)`}`;
const mapOf = (layer, head) => byId(`map-${layer}-${head}`);
const headName = (layer, head) => `${layerName(layer)}, head ${head}`;

/** The selection of a token `{ side, index }` alone. */
const only = ({ side, index }) => ({ query: null, key: null, [side]: index });
/** The query and the key of a token: both in self-attention. */
const sidesOf = ({ side, index }) => (about.isSelf ? { query: index, key: index } : only({ side, index }));
/** The current token: the one under the pointer, or the selected one, whose index is null if none is selected. */
function shownToken() {
  const side = state.query === null && state.key !== null ? "key" : "query";
  return hovered ?? { side, index: state[side] };
}

/** Changes the view. Within a view the new address replaces the old one, so that Back returns to the previous view. */
function go(changes) {
  const before = state.view;
  Object.assign(state, changes);
  if (state.view === "token" && state.key === null) state.query ??= 0;
  const { view, layer, head, as, query: token, key } = state;
  const parts = { model: {}, head: { layer, head, as, token, key }, token: { token, key } }[view];
  const said = Object.entries(parts).filter(([, value]) => value !== null && value !== START.as);
  history[view === before ? "replaceState" : "pushState"](null, "", `#${new URLSearchParams(said)}`);
  show();
}

/** Shows the view of the address, and reports the parts of it that this page does not have. */
function readAddress() {
  const limits = { layer: about.layers.length, head: shape.heads, token: shape.queries, key: shape.keys, as: FORMS };
  const { found: { token = null, ...found }, problems } = parseAddress(location.hash, limits);
  const isModel = token === null && !("key" in found);
  const view = "layer" in found || "head" in found ? "head" : isModel ? "model" : "token";
  Object.assign(state, START, found, { view, query: token });
  setText("problem", problems.length ? `The address is not of this page: ${problems.join(", ")}.` : "");
  show();
}

function show() {
  const focused = document.activeElement;
  hovered = null;
  for (const view of VIEWS) {
    byId(view).hidden = view !== state.view || isEmpty;
    byId(`to-${view}`).setAttribute("aria-current", view === state.view);
  }
  if (isEmpty) return;
  if (state.view === "head") showHead();
  if (state.view === "token") showToken();
  // If the focused element is gone, Tab would start at the top of the page.
  const isLost = document.activeElement === document.body || !document.activeElement.getClientRects().length;
  if (focused !== document.body && isLost) (state.view === "model" ? mapOf(state.layer, state.head) : byId(state.view)).focus();
}

function useTheme(isDark) {
  theme = document.documentElement.dataset.theme = isDark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", isDark);
  if (!isEmpty) drawModel();
  show();
}

/** The rows down and the columns to the right that a key moves, to another token, cell or head. */
const STEPS = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
  PageUp: [-20, 0], PageDown: [20, 0], Home: [-Infinity, 0], End: [Infinity, 0],
};

setText("title", about.title);
byId("empty").hidden = !isEmpty;
buildModel();
buildHead();
byId("theme").onclick = () => useTheme(theme === "light");
for (const button of document.querySelectorAll("[data-view], button[data-as]")) button.onclick = () => go({ ...button.dataset });
for (const name of ["hashchange", "popstate"]) addEventListener(name, readAddress);
addEventListener("resize", show);
addEventListener("keydown", (event) => {
  const { key, shiftKey, target } = event;
  if (isEmpty || event.ctrlKey || event.metaKey || event.altKey || target.matches("select")) return;
  const [step, enter] = [STEPS[key], target.dataset.enter];
  // Single characters press buttons, regardless of the focus, unless the reader has turned them off.
  const button = byId("shortcuts").checked ? document.querySelector(`[aria-keyshortcuts="${CSS.escape(key)}"]`) : null;
  if (step && !shiftKey && target.onStep) target.onStep(step);
  else if (shiftKey && key.startsWith("Arrow") && state.view === "head") moveHead(step[0] * shape.heads + step[1]);
  else if (key === "Enter" && VIEWS.includes(enter)) go({ view: enter });
  else if (key === "Enter" && enter) byId(enter).focus();
  else if (key === "Escape") go({ view: state.view === "token" ? "head" : "model" });
  else if (button?.getClientRects().length) button.click();
  else return;
  event.preventDefault();
});
const scheme = matchMedia("(prefers-color-scheme: dark)");
scheme.onchange = () => useTheme(scheme.matches);
scheme.onchange();
readAddress();
