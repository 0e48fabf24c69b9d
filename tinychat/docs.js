// /openapi.json for people: every route with the fields of its body.

const element = (name, text = "", kind = "") => {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
};

const nameOf = (ref) => ref.split("/").at(-1);

// A schema in a few words: "text", "list of ChatMessage", "number from 0 to 2".
function inWords(schema) {
  if (!schema || !Object.keys(schema).length) return "anything";
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.anyOf) {
    const kinds = schema.anyOf.filter(({ type }) => type !== "null").map(inWords);
    return [...new Set(kinds)].join(" or ");
  }
  if (schema.type === "array") return `list of ${inWords(schema.items)}`;
  const names = { string: "text", integer: "whole number", boolean: "true or false" };
  const range = ["minimum", "maximum"].map((key) => schema[key]);
  const limits =
    (range[0] === undefined ? "" : ` from ${range[0]}`) +
    (range[1] === undefined ? "" : ` to ${range[1]}`);
  return (names[schema.type] ?? schema.type ?? "anything") + limits;
}

function fields(schema) {
  const table = element("table");
  for (const [name, of] of Object.entries(schema.properties ?? {})) {
    const row = element("tr");
    const key = element("td");
    key.append(element("code", name));
    if (schema.required?.includes(name)) key.append(" (needed)");
    row.append(key, element("td", inWords(of)));
    table.append(row);
  }
  return table;
}

function route(method, path, operation, schemas) {
  const details = element("details");
  const summary = element("summary");
  summary.append(element("span", method.toUpperCase(), "method"), element("code", path));
  summary.append(element("span", operation.summary, "summary"));
  details.append(summary);
  const body = operation.requestBody?.content["application/json"].schema.$ref;
  if (body) details.append(fields(schemas[nameOf(body)]));
  return details;
}

const routes = document.getElementById("routes");
const key = localStorage.getItem("tinychat.key"); // as the chat page has asked for it
const headers = key ? { Authorization: `Bearer ${key}` } : {};
try {
  const response = await fetch("/openapi.json", { headers });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const { paths, components } = await response.json();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      routes.append(route(method, path, operation, components.schemas));
    }
  }
  document.getElementById("state").remove();
} catch (error) {
  document.getElementById("state").textContent = `it cannot be read: ${error.message}`;
}
