import js from "@eslint/js";
import tseslint from "typescript-eslint";

export default tseslint.config(js.configs.recommended, ...tseslint.configs.strict, {
  rules: {
    // Text from the model must never become markup.
    "no-restricted-properties": [
      "error",
      { property: "innerHTML" },
      { property: "outerHTML" },
      { property: "insertAdjacentHTML" },
      { object: "document", property: "write" },
      { object: "document", property: "cookie" },
    ],
    "no-restricted-syntax": ["error", { selector: "JSXAttribute[name.name='dangerouslySetInnerHTML']", message: "never markup from text" }],
    "no-eval": "error",
    "@typescript-eslint/no-non-null-assertion": "off",
    eqeqeq: "error",
  },
});
