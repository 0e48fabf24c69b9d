// Claude Code, headless, against /v1/messages by its base URL: it asks and prints what it is told.
// needs: @anthropic-ai/claude-code@2.1.330

import assert from "node:assert";
import { spawnSync } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";

const { EXO_URL, EXO_MODEL } = process.env;
const folder = mkdtempSync(path.join(tmpdir(), "claude-"));
const program = path.resolve("node_modules/.bin/claude");
const done = spawnSync(
  program,
  ["-p", "hello", "--model", EXO_MODEL, "--max-turns", "1", "--output-format", "json"],
  {
    cwd: folder,
    encoding: "utf8",
    timeout: 120_000,
    env: {
      ...process.env,
      HOME: folder,
      ANTHROPIC_BASE_URL: EXO_URL,
      ANTHROPIC_AUTH_TOKEN: "none",
      ANTHROPIC_MODEL: EXO_MODEL,
      ANTHROPIC_SMALL_FAST_MODEL: EXO_MODEL,
      ANTHROPIC_DEFAULT_HAIKU_MODEL: EXO_MODEL,
      CLAUDE_CODE_MAX_OUTPUT_TOKENS: "32",
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
      DISABLE_AUTOUPDATER: "1",
      IS_SANDBOX: "1",
    },
  },
);
assert(done.stdout, done.stderr);
const said = JSON.parse(done.stdout);
assert(said.usage.input_tokens > 0 && said.usage.output_tokens > 0, done.stdout);
console.log(JSON.stringify(said.type));
