// OpenAI's Codex, headless, against /v1/responses by its base URL: it writes a file by its shell.
// needs: @openai/codex@0.171.0

import { writesAFile } from "./agent.mjs";

const { EXO_URL, EXO_MODEL } = process.env;
writesAFile({
  name: "codex",
  program: "codex",
  // It asks nobody: the namespace and the empty folder are its sandbox.
  command: (task) => [
    "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task,
  ],
  files: {
    ".codex/config.toml": `model = "${EXO_MODEL}"
model_provider = "exo"

[model_providers.exo]
name = "exo"
base_url = "${EXO_URL}/v1"
wire_api = "responses"
`,
  },
});
