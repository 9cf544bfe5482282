// The views over all heads: a small map of each, and the keys and queries of a token.

function buildModel() {
  const smallMap = (layer, head) => {
    const describe = () => setText("model-readout", `${headName(layer, head)}: ${headText(layer, head)}`);
    return element("button", {
      id: `map-${layer}-${head}`, ariaLabel: headName(layer, head), tabIndex: layer || head ? -1 : 0,
      onclick: () => go({ view: "head", layer, head }),
      onpointerenter: describe,
      onfocus({ target }) {
        // Tab reaches one of the maps; arrow keys reach the others.
        byId("heads").querySelector("[tabindex='0']").tabIndex = -1;
        target.tabIndex = 0;
        describe();
      },
      onStep: ([down, right]) => mapOf(clamp(layer + down, about.layers.length), clamp(head + right, shape.heads)).focus(),
    }, element("canvas"), element("small"));
  };
  const { heads, queries, keys, top } = shape;
  const sequence = `${counted(queries, "query", "queries")} and ${counted(keys, "key")}`;
  setText("model-counts", `${counted(about.layers.length, "layer")} of ${counted(heads, "head")}, ${sequence}.`);
  setText("model-drawn", top === keys ? "all weights" : `at least the ${top} largest weights of each query`);
  const size = Math.max(96, Math.min(200, 900 / Math.max(heads, about.layers.length)));
  byId("heads").style = `--heads: ${heads}; --size: ${size}px`;
  byId("heads").append(element("span", {}, "layer, head"), ...range(heads, (head) => element("span", {}, head)));
  about.layers.forEach(({ name }, layer) => byId("heads").append(
    element("bdi", { title: name }, `${layer} ${name}`), ...range(heads, (head) => smallMap(layer, head))));
}

/** Describes a head in a line. */
function headText(layer, head) {
  const { entropy, notFinite, top, all, mostRead } = summaryOf(layer, head);
  if (notFinite) return `${counted(notFinite, "weight")} of the largest not finite, drawn in grey`;
  if (!(all > 0)) return "every key is hidden from every query";
  const most = `${tokenName("key", mostRead)}, ${percent(receivedBy(layer, head, mostRead) / all)} of all weight`;
  const others = layerAt(layer).isComplete ? "" : `; other keys than the ${shape.top} largest: ${percent(Math.max(0, 1 - top / all))}`;
  return `mean entropy ${entropy.toFixed(2)} nats; most read: ${most}${others}`;
}

/** Draws the small maps, a layer at a time, so that the page stays responsive. */
async function drawModel() {
  const [window, drawnTheme] = [[[0, shape.queries], [0, shape.keys]], theme];
  const perCell = window.map(([, end]) => Math.ceil(end / 64));
  for (let layer = 0; layer < about.layers.length && theme === drawnTheme; layer++) {
    for (let head = 0; head < shape.heads; head++) {
      const [canvas, number] = mapOf(layer, head).children;
      pixelsOf({ ...layerAt(layer).largest(head, window, perCell), most: 1 }, canvas);
      number.textContent = summaryOf(layer, head).entropy.toFixed(1);
    }
    performance.mark(layer + 1 < about.layers.length ? "some maps are drawn" : "all maps are drawn");
    await new Promise((resolve) => setTimeout(resolve));
  }
}

function showToken() {
  const [shown, heads] = [shownToken(), about.layers.flatMap((_, layer) => range(shape.heads, (head) => [layer, head]))];
  const { query, key } = sidesOf(shown);
  for (const side of about.isSelf ? ["query"] : SIDES) showTokens(`text-${side}`, side, sidesOf(shown)[side]);
  setText("token-name", `${about.isSelf ? "Token" : capital(shown.side)} ${tokenName(shown.side, shown.index)}`);
  showWeights("token-lists", { query, key }, heads);
  setText("by-head-title", query === null ? "By head: the mean weight that queries give it"
    : "By head: the weight of the key that it reads most");
  const mostRead = ([layer, head]) => sortByWeight(layerAt(layer).partners("query", head, query))[0];
  const marked = [state.layer, state.head];
  showMap("by-head", {
    rows: about.layers.length, columns: shape.heads, most: 1, marked,
    weights: heads.map((head) => (query === null ? receivedBy(...head, key) / shape.queries : mostRead(head)?.weight ?? 0)),
    labels: [about.layers.map(({ name }, layer) => name || `${layer}`), range(shape.heads, (head) => `head ${head}`)],
    describe(cell) {
      const [layer, head] = cell ?? marked;
      const best = query === null ? null : mostRead([layer, head]);
      const reads = best ? `reads ${tokenName("key", best.index)} most, ${textOf(best.weight)}` : "reads no key";
      const text = query === null ? `receives ${receivedBy(layer, head, key).toFixed(3)} in all` : reads;
      setText("by-head-readout", `${capital(headName(layer, head))}: ${text}`);
    },
    press: ([layer, head]) => go({ view: "head", layer, head }),
    choose: ([layer, head]) => go({ layer: clamp(layer, about.layers.length), head: clamp(head, shape.heads) }),
  });
}
