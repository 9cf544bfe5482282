import js from "@eslint/js";

const readonly = (names) => Object.fromEntries(names.split(" ").map((name) => [name, "readonly"]));
const ofBrowsers = readonly(
  "CSS Image ImageData OffscreenCanvas Option URLSearchParams addEventListener atob document getComputedStyle getSelection " +
  "history location matchMedia performance setTimeout",
);

export default [
  js.configs.recommended,
  { rules: { eqeqeq: "error", "no-var": "error", "prefer-const": "error" }, languageOptions: { globals: ofBrowsers } },
  { files: ["**/*.mjs"], languageOptions: { globals: readonly("Buffer URL console process") } },
];
