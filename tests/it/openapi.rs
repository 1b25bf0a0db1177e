//! `openapi.yaml` is what the admin API promises. It is held against the route table in both
//! directions here, and against every answer that the tests of `admin` see.

use std::collections::BTreeSet;

use http::Method;
use oncegate::api::routes;
use serde_json::{Value, json};

/// The document.
pub struct Spec(Value);

/// One request and what came back, to be held against the document.
pub struct Exchange<'a> {
    pub method: &'a Method,
    /// As sent, still encoded, without the query.
    pub path: &'a str,
    pub sent: Option<&'a Value>,
    pub status: u16,
    pub content_type: &'a str,
    pub body: &'a [u8],
}

impl Spec {
    pub fn load() -> Self {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.yaml");
        let text = std::fs::read_to_string(file).unwrap();
        Self(serde_saphyr::from_str(&text).unwrap())
    }

    /// Panics when the document does not promise this exchange.
    pub fn check(&self, exchange: &Exchange) {
        let Exchange { method, path, .. } = exchange;
        let operation = self.operation(method, path);
        let Some(operation) = operation else {
            assert!(
                matches!(exchange.status, 401 | 404 | 405),
                "{method} {path} is not documented and gave {}",
                exchange.status
            );
            return self.check_body(&problem(), exchange);
        };
        let response = &operation["responses"][exchange.status.to_string()];
        assert!(
            !response.is_null(),
            "{method} {path}: status {} is not documented",
            exchange.status
        );
        let content = &self.resolved(response)["content"];
        let plain = exchange.content_type.split(';').next().unwrap_or_default();
        let schema = &content[plain]["schema"];
        assert!(
            !schema.is_null(),
            "{method} {path}: {plain} is not documented"
        );
        self.check_body(schema, exchange);
        if let Some(sent) = exchange.sent.filter(|_| exchange.status == 200) {
            let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
            self.check_value(schema, sent, "the request that was taken");
        }
    }

    fn check_body(&self, schema: &Value, exchange: &Exchange) {
        let value = if exchange.content_type.starts_with("text/") {
            String::from_utf8(exchange.body.to_vec()).unwrap().into()
        } else {
            serde_json::from_slice(exchange.body).unwrap()
        };
        self.check_value(schema, &value, exchange.path);
    }

    fn check_value(&self, schema: &Value, value: &Value, what: &str) {
        let whole = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "components": self.0["components"],
            "allOf": [schema],
        });
        let validator = jsonschema::options()
            .should_validate_formats(true)
            .build(&whole)
            .unwrap();
        let errors: Vec<String> = validator
            .iter_errors(value)
            .map(|error| format!("{}: {error}", error.instance_path()))
            .collect();
        assert!(errors.is_empty(), "{what}: {errors:#?}\n{value:#}");
    }

    fn operation(&self, method: &Method, path: &str) -> Option<&Value> {
        let paths = self.0["paths"].as_object().unwrap();
        let item = paths.iter().find(|(template, _)| fits(template, path))?.1;
        item.get(method.as_str().to_lowercase())
    }

    fn resolved<'a>(&'a self, value: &'a Value) -> &'a Value {
        let Some(reference) = value["$ref"].as_str() else {
            return value;
        };
        let pointer = reference.strip_prefix('#').unwrap();
        let target = self.0.pointer(pointer);
        target.unwrap_or_else(|| panic!("{reference} leads nowhere"))
    }

    fn references<'a>(value: &'a Value, found: &mut Vec<&'a Value>) {
        if value.get("$ref").is_some() {
            found.push(value);
        }
        let children: Box<dyn Iterator<Item = &Value>> = match value {
            Value::Object(members) => Box::new(members.values()),
            Value::Array(items) => Box::new(items.iter()),
            _ => return,
        };
        children.for_each(|child| Self::references(child, found));
    }
}

fn problem() -> Value {
    json!({ "$ref": "#/components/schemas/Problem" })
}

/// Whether a path with its segments still encoded fits a template such as `/v1/{key}`.
fn fits(template: &str, path: &str) -> bool {
    let (wanted, given) = (template.split('/'), path.split('/'));
    wanted.clone().count() == given.clone().count()
        && wanted
            .zip(given)
            .all(|(wanted, given)| wanted.starts_with('{') || wanted == given)
}

#[test]
fn the_document_lists_what_exists_and_nothing_else() {
    let spec = Spec::load();
    let mut documented = BTreeSet::new();
    for (path, item) in spec.0["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if method == "parameters" {
                continue;
            }
            let schemes = operation["security"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            let roles: BTreeSet<String> = schemes
                .iter()
                .flat_map(|scheme| scheme.as_object().unwrap().keys().cloned())
                .collect();
            documented.insert((method.to_uppercase(), path.clone(), roles));
        }
    }
    let existing = routes().map(|route| {
        let roles = route
            .roles
            .iter()
            .map(|role| role.word().to_owned())
            .collect();
        (route.method.to_string(), route.path.to_owned(), roles)
    });
    assert_eq!(documented, existing.collect());
}

#[test]
fn every_reference_of_the_document_leads_somewhere() {
    let spec = Spec::load();
    let mut references = Vec::new();
    Spec::references(&spec.0, &mut references);
    assert!(references.len() > 50);
    for reference in references {
        spec.resolved(reference);
    }
}

#[test]
fn every_path_parameter_is_described() {
    let spec = Spec::load();
    for (path, item) in spec.0["paths"].as_object().unwrap() {
        let in_path = path.matches('{').count();
        let described = item["parameters"].as_array().map_or(0, |parameters| {
            let resolved = parameters.iter().map(|one| spec.resolved(one));
            resolved
                .filter(|one| path.contains(&format!("{{{}}}", one["name"].as_str().unwrap())))
                .count()
        });
        assert_eq!(in_path, described, "{path}");
    }
}
