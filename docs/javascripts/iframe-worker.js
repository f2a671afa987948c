// The search is a worker, and browsers start none for a page that was opened from a disk. There, this runs it in a
// hidden frame. (The theme's offline plugin would load such a script from elsewhere, but for one with this name.)
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${url}"></script>`;
      this.frame = new Promise((loaded) => {
        frame.onload = () => {
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          loaded(frame.contentWindow);
        };
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.frame.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
