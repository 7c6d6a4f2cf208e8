// Text as it comes, from a client that is generated from the protos. usage: npm start -- [HOST:PORT]
//
// OUTRIDER_CA (a file in PEM) and OUTRIDER_API_KEY are as for the Python SDK.

import { readFileSync } from "node:fs";
import { join } from "node:path";

import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

import type { ProtoGrpcType } from "./generated/inference";
import type { InferenceClient } from "./generated/outrider/v1/Inference";
import type { Finished__Output } from "./generated/outrider/v1/Finished";
import type { GenerateRequest } from "./generated/outrider/v1/GenerateRequest";
import type { GenerateResponse__Output } from "./generated/outrider/v1/GenerateResponse";

const PROTOS = join(__dirname, "../../../protos");
const ATTEMPTS = 6; // calls in a row that bring nothing

function connect(address: string): InferenceClient {
  const loaded = loadSync("outrider/v1/inference.proto", {
    includeDirs: [PROTOS],
    longs: String,
    enums: String,
    defaults: true,
    oneofs: true,
  });
  const { outrider } = grpc.loadPackageDefinition(loaded) as unknown as ProtoGrpcType;
  const ca = process.env.OUTRIDER_CA;
  const credentials = ca ? grpc.credentials.createSsl(readFileSync(ca)) : grpc.credentials.createInsecure();
  return new outrider.v1.Inference(address, credentials);
}

function caller(): grpc.Metadata {
  const metadata = new grpc.Metadata();
  if (process.env.OUTRIDER_API_KEY) metadata.set("authorization", `Bearer ${process.env.OUTRIDER_API_KEY}`);
  return metadata;
}

/** One answer, over as many calls as it takes: one that breaks off goes on behind the last chunk. */
async function generate(
  client: InferenceClient,
  request: GenerateRequest,
  say: (text: string) => void,
): Promise<Finished__Output> {
  let place: { sessionId: string; generation: number; nextPosition: string; textOffset: string } | undefined;
  for (let failures = 0; ; ) {
    const call = place ? client.Resume(place, caller()) : client.Generate(request, caller());
    try {
      for await (const event of call as AsyncIterable<GenerateResponse__Output>) {
        if (event.started && !place) {
          const { sessionId, generation } = event.started;
          place = { sessionId, generation, nextPosition: "0", textOffset: "0" };
        } else if (event.chunk && place) {
          say(event.chunk.text);
          const { nextPosition, textOffset } = event.chunk;
          place = { ...place, nextPosition, textOffset };
          failures = 0;
        } else if (event.finished) {
          return event.finished;
        }
      }
    } catch (error) {
      const code = (error as grpc.ServiceError).code;
      if (code !== grpc.status.UNAVAILABLE || ++failures >= ATTEMPTS) throw error;
      await new Promise((resolve) => setTimeout(resolve, 100 * 2 ** failures * (1 + Math.random() / 2)));
    }
  }
}

async function main(): Promise<void> {
  const client = connect(process.argv[2] ?? process.env.OUTRIDER_ROUTER ?? "127.0.0.1:7070");
  const request: GenerateRequest = {
    text: "def add(a, b):\n",
    sampling: { maxTokens: 48, temperature: 0.6, seed: "7" },
    idempotencyKey: crypto.randomUUID(), // a repeated call is then not a second answer
  };
  const { reason, usage } = await generate(client, request, (text) => process.stdout.write(text));
  console.log(`\n${reason}: ${usage?.completionTokens} tokens in ${usage?.steps} steps`);
  client.close();
}

main().catch((error: Error) => {
  console.error(error.message);
  process.exitCode = 1;
});
