// A coding agent, headless, in an empty folder that is its home too: it is told to write a file, and
// does. What the model says to that is in agents.json.

import assert from "node:assert";
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";

// `name`: of the task in agents.json; `program`: in node_modules/.bin; `command(task, folder)`: its
// arguments; `files`: what its home has, by path; `env`: besides today's.
export function writesAFile({ name, program, command, files = {}, env = {} }) {
  const folder = mkdtempSync(path.join(tmpdir(), `${name}-`));
  for (const [where, text] of Object.entries(files)) {
    mkdirSync(path.dirname(path.join(folder, where)), { recursive: true });
    writeFileSync(path.join(folder, where), text);
  }
  const task = `${name}-task: write hi into ${folder}/hello.txt`;
  const done = spawnSync(path.resolve("node_modules/.bin", program), command(task), {
    cwd: folder,
    encoding: "utf8",
    timeout: 120_000,
    stdio: ["ignore", "pipe", "pipe"],
    env: { ...process.env, HOME: folder, PWD: folder, ...env },
  });
  assert(done.status === 0, `${done.stdout}${done.stderr}`);
  assert(done.stdout.includes("It is written."), `${done.stdout}${done.stderr}`);
  console.log(JSON.stringify(readFileSync(path.join(folder, "hello.txt"), "utf8")));
}
