// Claude Code, headless, against /v1/messages by its base URL: it writes a file by its tool.
// needs: @anthropic-ai/claude-code@2.1.332

import { writesAFile } from "./agent.mjs";

const { EXO_URL, EXO_MODEL } = process.env;
writesAFile({
  name: "claude",
  program: "claude",
  command: (task) => ["-p", task, "--model", EXO_MODEL, "--max-turns", "4", "--allowedTools", "Write"],
  env: {
    ANTHROPIC_BASE_URL: EXO_URL,
    ANTHROPIC_AUTH_TOKEN: "none",
    ANTHROPIC_MODEL: EXO_MODEL,
    ANTHROPIC_SMALL_FAST_MODEL: EXO_MODEL,
    ANTHROPIC_DEFAULT_HAIKU_MODEL: EXO_MODEL,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    DISABLE_AUTOUPDATER: "1",
    IS_SANDBOX: "1",
  },
});
