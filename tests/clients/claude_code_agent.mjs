// Claude Code, headless, against /v1/messages by its base URL: it writes a file by its tool.
// needs: @anthropic-ai/claude-code@2.1.330

import assert from "node:assert";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";

const { EXO_URL, EXO_MODEL } = process.env;
const folder = mkdtempSync(path.join(tmpdir(), "claude-"));
const program = path.resolve("node_modules/.bin/claude");
// What the model is to say is in agents.json.
const task = `claude-task: write hi into ${folder}/hello.txt`;
const options = ["--model", EXO_MODEL, "--max-turns", "4", "--output-format", "json"];
const done = spawnSync(program, ["-p", task, ...options, "--allowedTools", "Write"], {
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
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    DISABLE_AUTOUPDATER: "1",
    IS_SANDBOX: "1",
  },
});
assert(done.stdout, done.stderr);
const said = JSON.parse(done.stdout);
assert.equal(said.result, "It is written.", done.stdout);
console.log(JSON.stringify([said.result, readFileSync(path.join(folder, "hello.txt"), "utf8")]));
