// Prints the schemas that Zod writes of small models, by its own writer and by zod-to-json-schema.
import { z } from "zod";
import { z as z3 } from "zod/v3";
import { zodToJsonSchema } from "zod-to-json-schema";

// Types that both versions of Zod have.
const common = (z) => {
  const address = z.object({ street: z.string().min(1), city: z.string(), zip: z.string().regex(/^\d{5}$/) });
  const cat = z.object({ kind: z.literal("cat"), lives: z.number().int().min(0).max(9) });
  const dog = z.object({ kind: z.literal("dog"), breed: z.string().optional() });
  const category = z.object({ name: z.string(), subcategories: z.lazy(() => category.array()) });
  return {
    address, cat, category,
    string: z.string(), lengths: z.string().min(2).max(5), exact: z.string().length(4), nonempty: z.string().nonempty(),
    email: z.string().email(), url: z.string().url(), uuid: z.string().uuid(), datetime: z.string().datetime(),
    offset: z.string().datetime({ offset: true }), cuid: z.string().cuid(), ulid: z.string().ulid(), emoji: z.string().emoji(),
    base64: z.string().base64(), nanoid: z.string().nanoid(), date: z.string().date(), time: z.string().time(),
    duration: z.string().duration(),
    starts: z.string().startsWith("ab"), ends: z.string().endsWith("yz"), includes: z.string().includes("mm"),
    regex: z.string().regex(/[a-f0-9]{4}/), two: z.string().regex(/^[a-z]/).regex(/\d$/), flags: z.string().regex(/^abc$/i),
    number: z.number(), integer: z.number().int(), bounds: z.number().min(1.5).max(2.5), exclusive: z.number().gt(0).lt(1),
    positive: z.number().int().positive(), multiple: z.number().multipleOf(0.25), step: z.number().int().multipleOf(3).min(0),
    boolean: z.boolean(), null: z.null(), any: z.any(), unknown: z.unknown(), never_list: z.array(z.never()),
    literal: z.literal("one"), literal_number: z.literal(7), enum: z.enum(["a", "b", "c"]),
    array: z.array(z.string()), array_bounds: z.array(z.number()).min(1).max(3), array_length: z.array(z.boolean()).length(2),
    tuple: z.tuple([z.string(), z.number()]), tuple_rest: z.tuple([z.string()]).rest(z.number()),
    record: z.record(z.string(), z.number()), record_keys: z.record(z.string().regex(/^x-/), z.string()),
    record_enum: z.record(z.enum(["p", "q"]), z.boolean()), map: z.record(z.string().min(2), address),
    object_strict: z.object({ a: z.string(), b: z.number().optional() }).strict(),
    object_loose: z.object({ a: z.string() }).passthrough(), catchall: z.object({ a: z.string() }).catchall(z.number()),
    optional: z.object({ a: z.string().optional(), b: z.number().nullish(), c: z.boolean().default(true) }),
    nullable: z.string().nullable(), partial: address.partial(), pick: address.pick({ city: true }),
    extend: address.extend({ country: z.string().length(2) }),
    union: z.union([z.string(), z.number()]), union_objects: z.union([cat, dog, address]),
    tagged: z.discriminatedUnion("kind", [cat, dog]), pets: z.array(z.discriminatedUnion("kind", [cat, dog])),
    intersection: z.intersection(address, cat), intersection_union: z.intersection(z.union([cat, dog]), z.object({ id: z.number() })),
    described: z.object({ q: z.string().describe("The question"), n: z.number().int().min(1).max(50).default(10) }),
    repeated: z.object({ from: address, to: address, via: z.array(address) }),
    refined: z.string().refine((value) => value.length % 2 === 0), branded: z.string().brand("Id"),
    readonly: z.array(z.string()).readonly(), catch: z.number().catch(3), pipe: z.string().pipe(z.string().min(2)),
  };
};
const only4 = {
  email: z.email(), uuid: z.uuidv4(), url: z.httpUrl(), ipv4: z.ipv4(), ipv6: z.ipv6(), cidrv4: z.cidrv4(), e164: z.e164(), jwt: z.jwt(),
  iso_date: z.iso.date(), iso_time: z.iso.time(), iso_datetime: z.iso.datetime(), iso_duration: z.iso.duration(), hostname: z.hostname(),
  int: z.int(), int32: z.int32(), uint32: z.uint32(), float32: z.float32(), json: z.json(), stringbool: z.literal(["yes", "no", 1, null]),
  template: z.templateLiteral(["v", z.number(), ".", z.enum(["alpha", "beta"])]), partial_record: z.partialRecord(z.enum(["a", "b"]), z.int()),
  get node() { return node; }, strict: z.strictObject({ a: z.int() }), loose: z.looseObject({ a: z.int() }), xor: z.xor([z.string(), z.int()]),
};
const node = z.object({ value: z.int(), get next() { return node.nullable(); } });

const convert = (schemas, convertOne) => {
  const results = {};
  for (const [name, schema] of Object.entries(schemas)) {
    try {
      results[name] = convertOne(schema);
    } catch (error) {
      process.stderr.write(`${name}: ${error.message}\n`);
    }
  }
  return results;
};
const hold = (z, schema) => z.object({ value: schema, other: schema.optional() });
const four = { ...common(z), ...only4 };
process.stdout.write(JSON.stringify({
  zod: convert(four, (schema) => z.toJSONSchema(hold(z, schema))),
  "zod-input": convert(four, (schema) => z.toJSONSchema(hold(z, schema), { io: "input", target: "draft-7" })),
  "zod-to-json-schema": convert(common(z3), (schema) => zodToJsonSchema(hold(z3, schema))),
  "zod-to-json-schema-openai": convert(common(z3), (schema) => zodToJsonSchema(hold(z3, schema), { target: "openAi" })),
}));
