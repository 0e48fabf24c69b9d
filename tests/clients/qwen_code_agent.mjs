// Qwen Code, headless, against /v1/chat/completions by its base URL: it writes a file by its tool.
// needs: @qwen-code/qwen-code@0.24.4

import { writesAFile } from "./agent.mjs";

writesAFile({
  name: "qwen",
  program: "qwen",
  command: (task) => ["-p", task, "--auth-type", "openai", "--yolo"],
  env: {
    OPENAI_BASE_URL: `${process.env.EXO_URL}/v1`,
    OPENAI_API_KEY: "none",
    OPENAI_MODEL: process.env.EXO_MODEL,
  },
});
