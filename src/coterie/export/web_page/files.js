// The folder's files: read with progress, unpacked, and parsed.

// Reads files of the folder, and tells `told` how many of their bytes are here, of how many.
export class Folder {
  constructor(address, told) {
    Object.assign(this, { address, told, here: 0, all: 0 });
  }

  async bytes(name) {
    const answer = await fetch(new URL(name, this.address), { cache: "no-cache" });
    if (!answer.ok) throw new Error(`${name} cannot be read (${answer.status})`);
    this.all += Number(answer.headers.get("content-length") ?? 0);
    const counted = new TransformStream({
      transform: (part, onwards) => {
        this.here += part.byteLength;
        this.told(this.here, this.all);
        onwards.enqueue(part);
      },
    });
    return unpacked(await new Response(answer.body.pipeThrough(counted)).arrayBuffer());
  }

  async json(name) {
    return JSON.parse(new TextDecoder().decode(await this.bytes(name)));
  }

  // The tensors of a client's file by name, as its graph takes them: {dtype, shape, data}.
  async tensors(name) {
    return scaled(tensorsOf(await this.bytes(name)));
  }
}

// What was packed by gzip; some servers have unpacked it already.
async function unpacked(buffer) {
  const [first, second] = new Uint8Array(buffer, 0, Math.min(2, buffer.byteLength));
  if (first !== 0x1f || second !== 0x8b) return buffer;
  const stream = new Blob([buffer]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const READERS = {
  F32: (bytes) => ({ dtype: "float32", data: new Float32Array(bytes) }),
  F16: (bytes) => ({ dtype: "float32", data: Float32Array.from(new Uint16Array(bytes), half) }),
  I8: (bytes) => ({ dtype: "float32", data: Float32Array.from(new Int8Array(bytes)) }),
  I64: (bytes) => ({ dtype: "int64", data: new BigInt64Array(bytes) }),
};

// A safetensors file: 8 bytes for the length of a header in JSON, the header, and the values.
function tensorsOf(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const found = {};
  for (const [name, { dtype, shape, data_offsets: ends }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [from, to] = ends.map((end) => 8 + length + end);
    found[name] = { shape, ...READERS[dtype](buffer.slice(from, to)) };
  }
  return found;
}

// Beside NAME (..., width) of 8 bits lies NAME.scale (..., 1), and the value is their product.
function scaled(tensors) {
  const found = {};
  for (const [name, tensor] of Object.entries(tensors)) {
    if (name.endsWith(".scale")) continue;
    const scale = tensors[`${name}.scale`]?.data;
    if (scale) tensor.data = tensor.data.map((value, i) => value * scale[rowOf(i, tensor.shape)]);
    found[name] = tensor;
  }
  return found;
}

const rowOf = (place, shape) => Math.floor(place / shape.at(-1));

// The number that 16 bits of IEEE 754 stand for.
function half(bits) {
  const [exponent, fraction] = [(bits >> 10) & 0x1f, bits & 0x3ff];
  const size = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
  return bits & 0x8000 ? -size : size;
}
