// Where this runs the report's modules are copied into `modules/`, beside this file.
import js from "@eslint/js";
import globals from "globals";

const noMarkup = ["innerHTML", "outerHTML", "insertAdjacentHTML", "write", "writeln"].map((property) => ({
  property,
  message: "Text of users must not become markup: make elements, and give them text.",
}));

export default [
  js.configs.recommended,
  {
    files: ["modules/**/*.js"],
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: globals.browser },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-script-url": "error",
      "no-restricted-properties": ["error", ...noMarkup],
      "no-shadow": "error",
      "no-var": "error",
      "prefer-const": "error",
      eqeqeq: "error",
      curly: ["error", "multi-line"],
      "max-lines": ["error", 400],
    },
  },
  { files: ["js/*.mjs"], languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: globals.node } },
];
