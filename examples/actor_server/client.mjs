// Grades what models in Python answer. Usage: node client.mjs ADDRESS SECRET_FILE, as server.py has printed it.
import { readFileSync } from "node:fs";

import { ActorClient } from "./actors.mjs";

const [address, secretFile] = process.argv.slice(2);
const client = new ActorClient(address, readFileSync(secretFile));
const [board, models] = [client.actor("board"), client.actor("models")];

for (let task; (task = await board.next_task()) !== null; ) {
  const answers = await models.answer(task.left, task.right); // one of each process of the mesh
  const right = answers.filter((answer) => answer === task.left + task.right).length;
  await board.report(task.number, right / answers.length);
  console.log(`${task.left} + ${task.right}: the models say ${answers.join(" and ")}`);
}
console.log(`mean reward ${(await board.mean_reward()).toFixed(2)}`);

try {
  await board.report(99, 1);
} catch (error) {
  console.log(`${error.code}: ${error.message}`); // an exception in Python; error.traceback is its traceback
}
client.close();
