// opencode, headless, against /v1/chat/completions by a provider in its file: it writes a file.
// needs: opencode-ai@1.18.33

import { writesAFile } from "./agent.mjs";

const { EXO_URL, EXO_MODEL } = process.env;
const name = `exo/${EXO_MODEL}`;
writesAFile({
  name: "opencode",
  program: "opencode",
  command: (task) => ["run", task],
  files: {
    "opencode.json": JSON.stringify({
      model: name,
      small_model: name,
      permission: { "*": "allow" },
      provider: {
        exo: {
          npm: "@ai-sdk/openai-compatible",
          options: { baseURL: `${EXO_URL}/v1`, apiKey: "none" },
          models: { [EXO_MODEL]: {} },
        },
      },
    }),
  },
  env: { OPENCODE_DISABLE_AUTOUPDATE: "1", OPENCODE_DISABLE_MODELS_FETCH: "1" },
});
