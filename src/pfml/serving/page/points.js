// The points of the map, drawn in one call by WebGL; by a 2D canvas where there is no WebGL.

const LARGEST_DENSITY = 2; // pixels of the screen in one of the page: more cost time and show nothing
const EMPHASIS = 1.35; // how much larger emphasized points are

const VERTEX = `#version 300 es
in vec2 place;
in vec4 color;
in float emphasis;
uniform vec2 middle;
uniform float zoom;
uniform float radius;
out vec4 fill;
out float reach;
out float framed;
void main() {
  reach = radius * mix(1.0, ${EMPHASIS}, emphasis);
  framed = emphasis;
  fill = color;
  gl_Position = vec4(2.0 * zoom * (place - middle), 0.0, 1.0);
  gl_PointSize = 2.0 * reach + 2.0;
}`;

const FRAGMENT = `#version 300 es
precision mediump float;
in vec4 fill;
in float reach;
in float framed;
uniform vec3 frame;
out vec4 color;
void main() {
  float distance = length(gl_PointCoord - 0.5) * (2.0 * reach + 2.0);
  float inside = clamp(reach + 0.5 - distance, 0.0, 1.0);
  if (inside <= 0.0) discard;
  vec3 shown = mix(fill.rgb, frame, framed * clamp(distance - reach + 1.7, 0.0, 1.0));
  color = vec4(shown, 1.0) * fill.a * inside;
}`;

const known = new Map();
const probe = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });

// The [red, green, blue] of a CSS color.
export function rgbOf(color) {
  if (!known.has(color)) {
    probe.fillStyle = color;
    probe.fillRect(0, 0, 1, 1);
    known.set(color, [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)]);
  }
  return known.get(color);
}

// Makes the canvas as large as it is shown; what one pixel of the page is in it, 0 if it is hidden.
export function fitted(canvas) {
  const density = Math.min(devicePixelRatio || 1, LARGEST_DENSITY);
  const [width, height] = [Math.round(canvas.clientWidth * density), Math.round(canvas.clientHeight * density)];
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  return width && height ? density : 0;
}

function program(gl) {
  const made = gl.createProgram();
  for (const [kind, text] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, text);
    gl.compileShader(shader);
    gl.attachShader(made, shader);
  }
  gl.linkProgram(made);
  if (!gl.getProgramParameter(made, gl.LINK_STATUS) && !gl.isContextLost()) throw new Error(gl.getProgramInfoLog(made));
  return made;
}

function byWebGL(canvas, gl) {
  let made = null;
  let given = null;

  function begin() {
    const built = program(gl);
    gl.useProgram(built);
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
    const attribute = (name, size, type, normalized) => {
      const buffer = gl.createBuffer();
      const place = gl.getAttribLocation(built, name);
      gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
      gl.enableVertexAttribArray(place);
      gl.vertexAttribPointer(place, size, type, normalized, 0, 0);
      return buffer;
    };
    made = {
      uniforms: Object.fromEntries(["middle", "zoom", "radius", "frame"].map((name) => [name, gl.getUniformLocation(built, name)])),
      places: attribute("place", 2, gl.FLOAT, false),
      colors: attribute("color", 4, gl.UNSIGNED_BYTE, true),
      emphasis: attribute("emphasis", 1, gl.UNSIGNED_BYTE, false),
      order: gl.createBuffer(),
    };
    gl.bindBuffer(gl.ELEMENT_ARRAY_BUFFER, made.order);
  }

  function send() {
    for (const [buffer, values] of [[made.places, given.places], [made.colors, given.colors], [made.emphasis, given.emphasis]]) {
      gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
      gl.bufferData(gl.ARRAY_BUFFER, values, gl.DYNAMIC_DRAW);
    }
    gl.bufferData(gl.ELEMENT_ARRAY_BUFFER, given.order, gl.DYNAMIC_DRAW);
  }

  begin();
  return {
    kind: "webgl",
    set(points) {
      given = points;
      if (!gl.isContextLost()) send();
    },
    restore() {
      begin();
      if (given) send();
    },
    draw(view, radius, frame) {
      const density = fitted(canvas);
      if (!density || gl.isContextLost()) return;
      gl.viewport(0, 0, canvas.width, canvas.height);
      gl.clearColor(0, 0, 0, 0);
      gl.clear(gl.COLOR_BUFFER_BIT);
      if (!given) return;
      gl.uniform2f(made.uniforms.middle, view.x, view.y);
      gl.uniform1f(made.uniforms.zoom, view.zoom);
      gl.uniform1f(made.uniforms.radius, radius * density);
      gl.uniform3f(made.uniforms.frame, ...rgbOf(frame).map((value) => value / 255));
      gl.drawElements(gl.POINTS, given.order.length, gl.UNSIGNED_INT, 0);
    },
  };
}

function byPen(canvas) {
  const pen = canvas.getContext("2d");
  let given = null;
  return {
    kind: "2d",
    set: (points) => (given = points),
    restore: () => {},
    draw(view, radius, frame) {
      const density = fitted(canvas);
      if (!density) return;
      pen.setTransform(density, 0, 0, density, 0, 0);
      const [width, height] = [canvas.clientWidth, canvas.clientHeight];
      pen.clearRect(0, 0, width, height);
      for (const k of given?.order ?? []) {
        const left = ((given.places[2 * k] - view.x) * view.zoom + 0.5) * width;
        const top = ((view.y - given.places[2 * k + 1]) * view.zoom + 0.5) * height;
        if (left < -9 || top < -9 || left > width + 9 || top > height + 9) continue;
        const [red, green, blue, alpha] = given.colors.subarray(4 * k, 4 * k + 4);
        pen.fillStyle = `rgba(${red}, ${green}, ${blue}, ${alpha / 255})`;
        pen.beginPath();
        pen.arc(left, top, radius * (given.emphasis[k] ? EMPHASIS : 1), 0, 2 * Math.PI);
        pen.fill();
        if (!given.emphasis[k]) continue;
        pen.strokeStyle = frame;
        pen.lineWidth = 1.2;
        pen.stroke();
      }
    },
  };
}

// What draws points on a canvas.
//   set({places, colors, emphasis, order}): x and y in turn; red, green, blue, alpha; 1 for larger ones; what is drawn, the last on top.
//   draw({x, y, zoom}, radius, frame): the view, the radius in pixels of the page, the color around larger points.
export function pointLayer(canvas, redraw) {
  const gl = canvas.getContext("webgl2", { premultipliedAlpha: true, antialias: false });
  if (!gl) return byPen(canvas);
  const layer = byWebGL(canvas, gl);
  canvas.addEventListener("webglcontextlost", (event) => event.preventDefault()); // so that it can be restored
  canvas.addEventListener("webglcontextrestored", () => {
    layer.restore();
    redraw();
  });
  return layer;
}
