/* Browsers start no worker for pages that are opened as files. There the search runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.appendChild(frame);
      const inside = frame.contentWindow, script = frame.contentDocument.createElement("script");
      inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
      this.frame = frame;
      this.ready = new Promise((done) => { script.onload = done; });
      script.onerror = () => this.onerror?.(new Event("error"));
      script.src = address;
      frame.contentDocument.body.appendChild(script);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow?.onmessage?.({ data }));
    }
    terminate() { this.frame.remove(); }
  };
}
