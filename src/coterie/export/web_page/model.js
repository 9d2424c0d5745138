// One client's model: the base's graph with the client's tensors as inputs.

export class Model {
  // ort: onnxruntime-web; session: of the base; own: the client's tensors, as ort's; caches: heads
  // and widths of each layer's keys and values; routed: whether its experts have a router.
  constructor(ort, session, own, caches, routed) {
    Object.assign(this, { ort, session, own, routed, before: null });
    this.caches = caches.flatMap(({ heads, key, value }, i) => [
      { name: `${i}.key`, heads, width: key },
      { name: `${i}.value`, heads, width: value },
    ]);
  }

  // The cache behind a prompt, and of its only row the next token's probabilities and the experts'
  // weights. What the call before has computed is not computed again.
  async prompt(ids) {
    const known = this.before !== null && this.before.ids.every((id, i) => id === ids[i]);
    const from = known ? this.before.ids.length : 0;
    if (known && from === ids.length) return this.before.found;
    const found = await this.run([ids.slice(from)], known ? this.before.found.cache : this.empty());
    this.before = { ids, found };
    return found;
  }

  // The same behind one token more of several texts, each of which goes on from a row of a cache.
  next(cache, rows, tokens) {
    return this.run(tokens.map((token) => [token]), this.selected(cache, rows));
  }

  async run(ids, past) {
    const [rows, tokens] = [ids.length, ids[0].length];
    const inputs = {
      input_ids: this.integers(ids.flat(), [rows, tokens]),
      logits_to_keep: this.integers([tokens - 1], [1]),
      ...this.own,
    };
    this.caches.forEach(({ name, heads, width }, i) => {
      const shape = [rows, heads, past.length, width];
      inputs[`past_key_values.${name}`] = new this.ort.Tensor("float32", past.values[i], shape);
    });
    const found = await this.session.run(inputs);
    const values = this.caches.map(({ name }) => found[`present.${name}`].data);
    return {
      cache: { values, length: past.length + tokens },
      p: rowsOf(found.logits, rows).map(softmax),
      experts: rowsOf(found.routing, rows).map((row) => (this.routed ? [...row] : null)),
    };
  }

  integers(values, shape) {
    return new this.ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);
  }

  empty() {
    return { values: this.caches.map(() => new Float32Array(0)), length: 0 };
  }

  // Of a cache, (rows, heads, length, width) of each layer, these rows.
  selected(cache, rows) {
    const values = this.caches.map(({ heads, width }, i) => {
      const size = heads * cache.length * width;
      const found = new Float32Array(rows.length * size);
      rows.forEach((row, place) => {
        found.set(cache.values[i].subarray(row * size, (row + 1) * size), place * size);
      });
      return found;
    });
    return { values, length: cache.length };
  }
}

function rowsOf({ data }, rows) {
  const size = data.length / rows;
  return Array.from({ length: rows }, (_, row) => data.subarray(row * size, (row + 1) * size));
}

function softmax(logits) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const found = Float64Array.from(logits, (value) => Math.exp(value - most));
  const sum = found.reduce((a, b) => a + b, 0);
  return found.map((value) => value / sum);
}
