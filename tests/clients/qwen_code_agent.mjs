// Qwen Code, headless, against /v1/chat/completions by its base URL.
// needs: @qwen-code/qwen-code@0.24.4

import assert from "node:assert";
import { spawnSync } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";

const { EXO_URL, EXO_MODEL } = process.env;
const folder = mkdtempSync(path.join(tmpdir(), "qwen-"));
const program = path.resolve("node_modules/.bin/qwen");
const done = spawnSync(program, ["-p", "hello", "--auth-type", "openai"], {
  cwd: folder,
  encoding: "utf8",
  timeout: 120_000,
  env: {
    ...process.env,
    HOME: folder,
    OPENAI_BASE_URL: `${EXO_URL}/v1`,
    OPENAI_API_KEY: "none",
    OPENAI_MODEL: EXO_MODEL,
    QWEN_CODE_MAX_OUTPUT_TOKENS: "32",
  },
});
assert(done.status === 0 && done.stdout.trim(), done.stderr + done.stdout);
console.log(JSON.stringify(done.stdout.trim().length > 0));
