// A client of actor servers: what the head of control/wire/proto/actor_service.proto asks of one, and no more.
import { createHmac, randomBytes, timingSafeEqual } from "node:crypto";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const PROTO = fileURLToPath(new URL("../../control/wire/proto/actor_service.proto", import.meta.url));
const definition = loader.loadSync(PROTO, { keepCase: true, enums: String, defaults: true });
const rpcs = grpc.loadPackageDefinition(definition).skipper.control.v1.ActorService.service;

const PROOF_NBYTES = 32;
const PROOF_FIELD = 0x7a; // number 15, of bytes: the last field of every message

/** M(key, parts) of the protocol: HMAC-SHA256 over the parts, each after its length. */
function mac(key, ...parts) {
  const hmac = createHmac("sha256", key);
  for (const part of parts.map((part) => Buffer.from(part))) hmac.update(uint64(part.length)).update(part);
  return hmac.digest();
}

function uint64(value) {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(BigInt(value));
  return bytes;
}

function verify(expected, given) {
  if (given.length !== expected.length || !timingSafeEqual(expected, given))
    throw new Error("the server does not know the secret of this client; its answer was not read");
}

/** A call did not end in a result. `code` is the name of an ErrorCode, `traceback` that of an exception in Python. */
export class ActorError extends Error {
  constructor({ code, message, traceback }) {
    super(message);
    Object.assign(this, { code, traceback });
  }
}

export class ActorClient {
  #channel;
  #session = null; // a promise: calls that are made meanwhile wait for the same one
  #number = 0;

  /** A client of the server at "host:port"; `secret` is a Buffer with what both sides know. */
  constructor(address, secret) {
    this.secret = secret;
    this.#channel = new grpc.Client(address, grpc.credentials.createInsecure());
  }

  /** An object whose methods are those of the actor: `await client.actor("board").report(1, 0.5)`. */
  actor(name, { timeoutMs = 10_000 } = {}) {
    const call = (method) => (...args) => this.#invoke(name, method, args, timeoutMs);
    return new Proxy({}, { get: (_, method) => call(method) });
  }

  /** The actors of the server: a list of { name, actor_handle, class_name }. */
  async list(timeoutMs = 10_000) {
    return (await this.#proven("ListActors", { namespace: "" }, timeoutMs)).actors;
  }

  close() {
    this.#channel.close();
  }

  async #invoke(actor, method, args, timeoutMs) {
    const request = { actor, method, args: Buffer.from(JSON.stringify(args)), encoding: "ENCODING_JSON" };
    const { result, error } = await this.#proven("Invoke", request, timeoutMs);
    if (error) throw new ActorError(error);
    return JSON.parse(result.toString());
  }

  /** A request with a proof, and an answer whose proof has been verified. */
  async #proven(rpc, request, timeoutMs) {
    try {
      return await this.#exchange(await (this.#session ??= this.#open(timeoutMs)), rpc, request, timeoutMs);
    } catch (error) {
      this.#session = null; // the server may be another one by now: the next call opens a session of its own
      throw error;
    }
  }

  async #exchange({ session, key }, rpc, request, timeoutMs) {
    const number = uint64(++this.#number);
    const body = rpcs[rpc].requestSerialize(request);
    const proof = Buffer.concat([session, number, mac(key, "request", rpc, number, body)]);
    const size = [(proof.length & 0x7f) | 0x80, proof.length >> 7]; // a varint
    const answer = await this.#unary(rpc, Buffer.concat([body, Buffer.from([PROOF_FIELD, ...size]), proof]), timeoutMs);
    const end = Math.max(0, answer.length - PROOF_NBYTES - 2); // the answer's field: its key, its size, the proof
    verify(mac(key, "answer", rpc, number, answer.subarray(0, end)), answer.subarray(end + 2));
    return rpcs[rpc].responseDeserialize(answer.subarray(0, end));
  }

  async #open(timeoutMs) {
    const nonce = randomBytes(32);
    const request = rpcs.OpenSession.requestSerialize({ version: 1, nonce });
    const { session, proof } = rpcs.OpenSession.responseDeserialize(await this.#unary("OpenSession", request, timeoutMs));
    verify(mac(this.secret, "skipper actors", "server", nonce, session), proof);
    return { session, key: mac(this.secret, "skipper actors", "key", nonce, session) };
  }

  #unary(rpc, request, timeoutMs) {
    const asItIs = (bytes) => bytes;
    const deadline = new Date(Date.now() + timeoutMs);
    return new Promise((resolve, reject) => {
      const done = (error, answer) => (error ? reject(error) : resolve(answer));
      this.#channel.makeUnaryRequest(rpcs[rpc].path, asItIs, asItIs, request, { deadline }, done);
    });
  }
}
