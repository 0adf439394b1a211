// The documentation of the API, from openapi.json; nothing is loaded from other servers.

import { attempt, element } from "/page/api.js";

const nameOf = (reference) => reference.split("/").pop();

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items)}`;
  return schema.format ? `${schema.type} (${schema.format})` : (schema.type ?? "any");
}

function table(rows) {
  const cells = rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell ?? ""))));
  return element("div", { class: "scroll" }, element("table", {}, element("tbody", {}, ...cells)));
}

function fields(schema) {
  return Object.entries(schema.properties ?? {}).map(([name, one]) => [name, typeOf(one), one.description ?? ""]);
}

function operation(path, method, one, schemas) {
  const rows = (one.parameters ?? []).map((each) => [
    each.name,
    `${typeOf(each.schema)}${each.required ? ", required" : ""}`,
    each.description ?? each.schema?.description ?? "",
  ]);
  for (const [kind, content] of Object.entries(one.requestBody?.content ?? {})) {
    const schema = content.schema.$ref ? schemas[nameOf(content.schema.$ref)] : content.schema;
    rows.push(...fields(schema).map((row) => [row[0], `${row[1]}, ${kind}`, row[2]]));
  }
  const responses = Object.entries(one.responses).map(([code, response]) => {
    const content = Object.entries(response.content ?? {})[0];
    const type = content ? typeOf(content[1].schema) || content[0] : "nothing";
    return [code, type, response.description];
  });
  const summary = (one.description ?? one.summary ?? "").trim();
  return element(
    "details",
    { class: "panel operation", id: `${method}-${path}` },
    element("summary", {}, element("code", { class: `method ${method}` }, method.toUpperCase()), element("code", {}, path), element("span", { class: "quiet" }, summary)),
    element("h3", {}, "Parameters"),
    rows.length ? table(rows) : element("p", { class: "quiet" }, "none"),
    element("h3", {}, "Responses"),
    table(responses),
  );
}

attempt(async () => {
  const openapi = await (await fetch("/api/openapi.json")).json();
  const schemas = openapi.components?.schemas ?? {};
  document.getElementById("title").textContent = `${openapi.info.title} ${openapi.info.version}`;
  document.getElementById("about").textContent = openapi.info.description ?? "";
  for (const [path, methods] of Object.entries(openapi.paths).sort()) {
    for (const [method, one] of Object.entries(methods)) {
      document.getElementById("operations").append(operation(path, method, one, schemas));
    }
  }
  for (const [name, schema] of Object.entries(schemas)) {
    const rows = fields(schema);
    document.getElementById("schemas").append(
      element("details", { class: "panel operation" }, element("summary", {}, element("code", {}, name), element("span", { class: "quiet" }, schema.description ?? "")), table(rows)),
    );
  }
});
