// pi, headless, against /v1/chat/completions by a provider in its file: it writes a file by its tool.
// needs: @mariozechner/pi-coding-agent@0.73.1

import { writesAFile } from "./agent.mjs";

const { EXO_URL, EXO_MODEL } = process.env;
const provider = {
  baseUrl: `${EXO_URL}/v1`,
  api: "openai-completions",
  apiKey: "none",
  models: [{ id: EXO_MODEL }],
};
writesAFile({
  name: "pi",
  program: "pi",
  command: (task) => ["--offline", "--provider", "exo", "--model", EXO_MODEL, "-p", task],
  files: { ".pi/agent/models.json": JSON.stringify({ providers: { exo: provider } }) },
});
