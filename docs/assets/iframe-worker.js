/* Search in a page that is opened as a file. Browsers start no workers there, so the theme's search runs in a hidden
   frame instead: messages to it are events in the frame, and what it posts are events here. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.documentElement.appendChild(frame);
      const inside = (this.inside = frame.contentWindow);
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = new URL(address, location.href).href;
      script.onload = () => {
        this.waiting.forEach((data) => this.tell(data));
        this.waiting = null;
      };
      script.onerror = () => this.dispatchEvent(new Event("error"));
      inside.document.documentElement.appendChild(script);
    }

    tell(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.tell(data);
    }
  };
}
