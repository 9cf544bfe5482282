import js from "@eslint/js";

const names = (text, value) => Object.fromEntries(text.split(" ").map((name) => [name, value]));
const ofBrowsers =
  "ImageData Image URLSearchParams addEventListener atob devicePixelRatio document getComputedStyle getSelection history " +
  "location matchMedia performance setTimeout";

export default [
  js.configs.recommended,
  { rules: { eqeqeq: "error", "no-var": "error", "prefer-const": "error", "no-shadow-restricted-names": "error" } },
  // The page's scripts, which ci/page.sh joins as the page does.
  { files: ["**/page.js"], languageOptions: { globals: names(ofBrowsers, "readonly") } },
  { files: ["**/*.mjs"], languageOptions: { globals: names("Buffer URL document getSelection performance process", "readonly") } },
];
