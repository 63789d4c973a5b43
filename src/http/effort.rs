//! Effort of reasoning, as variables of chat templates.

use serde_json::{Map, Value};

use super::fault::{Fault, invalid};

/// Sets the variables by which templates choose the effort: `reasoning_effort` (gpt-oss), in the three degrees that
/// templates know, and `enable_thinking` (most others). Variables that the client has set itself stay.
///
/// # Errors
/// 400 naming the field, its value and the known degrees.
pub(super) fn request(
    field: &str,
    effort: Option<&Value>,
    variables: &mut Map<String, Value>,
) -> Result<(), Fault> {
    let Some(effort) = effort.filter(|effort| !effort.is_null()) else {
        return Ok(());
    };
    let (thinks, degree) = match effort.as_str() {
        Some("none" | "minimal") => (false, "low"),
        Some("low") => (true, "low"),
        Some("medium") => (true, "medium"),
        Some("high" | "xhigh" | "max") => (true, "high"),
        text => {
            let shown = text.map_or_else(|| effort.to_string(), str::to_owned);
            return invalid(
                field,
                shown,
                "is not one of `none`, `minimal`, `low`, `medium`, `high`, `xhigh`, `max`",
            );
        }
    };
    variables
        .entry("reasoning_effort")
        .or_insert_with(|| Value::String(degree.to_owned()));
    variables
        .entry("enable_thinking")
        .or_insert(Value::Bool(thinks));
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn variables(effort: &Value, own: &Value) -> Result<Value, Fault> {
        let mut variables = own.as_object().cloned().unwrap_or_default();
        request("reasoning_effort", Some(effort), &mut variables)?;
        Ok(Value::Object(variables))
    }

    #[test]
    fn an_effort_becomes_what_templates_know_and_gives_way_to_variables_of_the_client() {
        for (effort, thinks, degree) in [
            ("none", false, "low"),
            ("minimal", false, "low"),
            ("low", true, "low"),
            ("medium", true, "medium"),
            ("xhigh", true, "high"),
            ("max", true, "high"),
        ] {
            let expected = json!({"enable_thinking": thinks, "reasoning_effort": degree});
            assert_eq!(variables(&json!(effort), &json!({})).unwrap(), expected);
        }
        let own = json!({"enable_thinking": false});
        let expected = json!({"enable_thinking": false, "reasoning_effort": "high"});
        assert_eq!(variables(&json!("high"), &own).unwrap(), expected);
        assert_eq!(variables(&Value::Null, &json!({})).unwrap(), json!({}));
        for wrong in [json!("much"), json!(3)] {
            let fault = variables(&wrong, &json!({}))
                .unwrap_err()
                .to_json()
                .to_string();
            assert!(fault.contains("is not one of `none`"), "{fault}");
        }
    }
}
