// The view of the model: a small map of each head.

function buildModel() {
  const { heads, queries, keys, top } = shape;
  byId("model-summary").textContent =
    `${counted(about.layers.length, "layer")} of ${counted(heads, "head")}, ${counted(queries, "query", "queries")} and ` +
    `${counted(keys, "key")}. In a small map queries go down and keys across; ` +
    `${top === keys ? "all weights" : `at least the ${top} largest weights of each query`} are drawn. ` +
    "The number below is the mean entropy in nats, which is low where a head reads few keys.";
  const grid = byId("heads");
  grid.style.setProperty("--heads", heads);
  grid.style.setProperty("--size", `${Math.max(96, Math.min(200, 900 / Math.max(heads, about.layers.length)))}px`);
  grid.append(element("span", {}, "layer, head"), ...range(heads, (head) => element("span", {}, head)));
  about.layers.forEach(({ name }, layer) => grid.append(element("bdi", { title: name }, `${layer} ${name}`), ...range(heads, (head) => {
    const describe = () => (byId("model-readout").textContent = `${headName(layer, head)}: ${headText(layer, head)}`);
    const listeners = { onclick: () => go({ view: "head", layer, head }), onfocus: describe, onpointerenter: describe };
    const attributes = { id: `map-${layer}-${head}`, "aria-label": headName(layer, head), tabindex: -1, ...listeners };
    return element("button", attributes, element("canvas", {}), element("small", {}));
  })));
  byId("map-0-0").tabIndex = 0;
  on("heads", "keydown", (event) => {
    const [, layer, head] = event.target.id.split("-").map(Number);
    const [down, right] = arrow(event) ?? [];
    const next = byId(`map-${layer + down}-${head + right}`);
    if (!next) return;
    event.preventDefault();
    focusMap(next);
  });
}

/** Moves the one tab stop of the maps. */
function focusMap(button) {
  byId("heads").querySelector("[tabindex='0']").tabIndex = -1;
  button.tabIndex = 0;
  button.focus();
}

/** What there is to say of a head in a line. */
function headText(layer, head) {
  const { entropy, notFinite, top, all, mostRead } = summaryOf(layer, head);
  if (notFinite) return `${counted(notFinite, "weight")} of the largest not finite, drawn in grey`;
  if (!(all > 0)) return "every key is hidden from every query";
  const most = `${named("key", mostRead)}, ${percent(receivedBy(layer, head, mostRead) / all)} of all weight`;
  const others = layerAt(layer).isComplete ? "" : `; other keys than the ${shape.top} largest: ${percent(Math.max(0, 1 - top / all))}`;
  return `mean entropy ${entropy.toFixed(2)} nats; most read: ${most}${others}`;
}

/** Draws the small maps of the layers from one on, a few at a time, so that the page answers meanwhile. */
function drawModel(layer = 0, run = (drawModel.run = {})) {
  const all = { query: [0, shape.queries], key: [0, shape.keys] };
  const per = { query: Math.ceil(shape.queries / 64), key: Math.ceil(shape.keys / 64) };
  for (const start = performance.now(); layer < about.layers.length && performance.now() - start < 30; layer++) {
    for (let head = 0; head < shape.heads; head++) {
      const [canvas, number] = byId(`map-${layer}-${head}`).children;
      canvas.map ??= { ...layerAt(layer).largest(head, all, per), most: 1 };
      pixelsOf(canvas.map, canvas);
      number.textContent = summaryOf(layer, head).entropy.toFixed(1);
    }
  }
  performance.mark(layer < about.layers.length ? "some maps are drawn" : "all maps are drawn");
  if (layer < about.layers.length) setTimeout(() => run === drawModel.run && drawModel(layer, run));
}
