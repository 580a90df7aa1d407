"use strict";
// Keys: an element with data-key="j ArrowRight" is clicked, or focused if it is a field.
document.addEventListener("keydown", (event) => {
  const field = event.target.closest("input, textarea, select, audio, video");
  if (event.key === "Escape" && field) field.blur();
  if (field || event.ctrlKey || event.metaKey || event.altKey) return;
  for (const element of document.querySelectorAll("[data-key]")) {
    if (element.dataset.key.split(" ").includes(event.key)) {
      event.preventDefault();
      if (element.matches("input")) element.focus(); else element.click();
      return;
    }
  }
});
// A picture that cannot be decoded says so.
function broken(image) {
  const text = document.createElement("span");
  text.className = "broken";
  text.textContent = "This picture cannot be decoded";
  image.replaceWith(text);
}
document.addEventListener("error", (event) => {
  if (event.target.matches?.("img")) broken(event.target);
}, true);
for (const image of document.images) if (image.complete && !image.naturalWidth && image.loading !== "lazy") broken(image);
// A choice takes effect at once.
document.addEventListener("change", (event) => {
  if (event.target.matches("select")) event.target.form.requestSubmit();
});
// What is known of a token stands below while it is pointed at, or was tapped.
const about = document.getElementById("about-token");
if (about) {
  for (const kind of ["pointerover", "click"]) {
    document.addEventListener(kind, (event) => {
      const token = event.target.closest(".t");
      if (token) about.textContent = token.title;
    });
  }
}
