// Qwen Code, headless, against /v1/chat/completions by its base URL: it writes a file by its tool.
// needs: @qwen-code/qwen-code@0.24.4

import assert from "node:assert";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";

const { EXO_URL, EXO_MODEL } = process.env;
const folder = mkdtempSync(path.join(tmpdir(), "qwen-"));
const program = path.resolve("node_modules/.bin/qwen");
// What the model is to say is in agents.json.
const task = `qwen-task: write hi into ${folder}/hello.txt`;
const done = spawnSync(program, ["-p", task, "--auth-type", "openai", "--yolo"], {
  cwd: folder,
  encoding: "utf8",
  timeout: 120_000,
  env: {
    ...process.env,
    HOME: folder,
    OPENAI_BASE_URL: `${EXO_URL}/v1`,
    OPENAI_API_KEY: "none",
    OPENAI_MODEL: EXO_MODEL,
  },
});
assert(done.status === 0, done.stderr + done.stdout);
assert(done.stdout.includes("It is written."), done.stdout + done.stderr);
console.log(JSON.stringify(readFileSync(path.join(folder, "hello.txt"), "utf8")));
