//! OTLP resource of the spans: this program, its run and its machine.

use std::collections::BTreeMap;

/// Resource attributes of the run `instance` on the machine `host`, overridden by the standard variables
/// `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME`.
pub fn resource(
    instance: &str,
    host: Option<String>,
    variable: impl Fn(&str) -> Option<String>,
) -> BTreeMap<String, String> {
    let own = [
        ("service.name", "cotenant"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("service.instance.id", instance),
    ];
    let mut attributes: BTreeMap<String, String> = own
        .map(|(key, text)| (key.to_owned(), text.to_owned()))
        .into();
    let set = |name: &str| variable(name).filter(|text| !text.is_empty());
    attributes.extend(host.map(|name| ("host.name".to_owned(), name)));
    if let Some(text) = set("OTEL_RESOURCE_ATTRIBUTES") {
        match listed(&text) {
            Some(listed) => attributes.extend(listed),
            None => tracing::warn!(
                value = text,
                "cannot read OTEL_RESOURCE_ATTRIBUTES, which is ignored: it is not `key=value,key=value`, percent-encoded"
            ),
        }
    }
    attributes.extend(set("OTEL_SERVICE_NAME").map(|name| ("service.name".to_owned(), name)));
    attributes
}

/// The pairs of `key=value,key=value`. `None` if one is malformed: OpenTelemetry's specification then discards all.
fn listed(text: &str) -> Option<Vec<(String, String)>> {
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair.split_once('=')?;
            let key = decoded(key.trim()).filter(|key| !key.is_empty())?;
            Some((key, decoded(value.trim())?))
        })
        .collect()
}

fn decoded(text: &str) -> Option<String> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => u8::try_from(16 * digit(rest.next()?)? + digit(rest.next()?)?).ok()?,
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> BTreeMap<String, String> {
        resource("run", Some("board".to_owned()), |name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, text)| (*text).to_owned())
        })
    }

    #[test]
    fn the_resource_names_the_machine_and_what_the_standard_variables_say() {
        let own = of(&[
            ("OTEL_RESOURCE_ATTRIBUTES", ""),
            ("OTEL_SERVICE_NAME", ""),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:4318"),
        ]);
        let expected = [
            ("host.name", "board"),
            ("service.instance.id", "run"),
            ("service.name", "cotenant"),
            ("service.version", env!("CARGO_PKG_VERSION")),
        ];
        let expected = expected.map(|(key, text)| (key.to_owned(), text.to_owned()));
        assert_eq!(own, BTreeMap::from(expected));
        let said = of(&[
            (
                "OTEL_RESOURCE_ATTRIBUTES",
                "service.name=a, deployment.environment.name=at%20home%2C%C3%BC,host.name=kitchen,empty=,",
            ),
            ("OTEL_SERVICE_NAME", "b"),
        ]);
        for (key, text) in [
            ("service.name", "b"),
            ("deployment.environment.name", "at home,\u{fc}"),
            ("host.name", "kitchen"),
            ("empty", ""),
            ("service.instance.id", "run"),
        ] {
            assert_eq!(said[key], text, "{key}");
        }
    }

    #[test]
    fn a_malformed_list_counts_for_nothing() {
        for malformed in ["a", "a=1,b", "=1", "a=%", "a=%4", "a=%+1", "a=%ff"] {
            let said = of(&[("OTEL_RESOURCE_ATTRIBUTES", malformed)]);
            assert_eq!(said, of(&[]), "{malformed}");
        }
    }
}
