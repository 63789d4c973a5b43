#!/usr/bin/env python3
"""The parsers of prometheus_client, unmodified, on the metrics of a running cotenant.

    metrics_client.py http://127.0.0.1:8410
"""

import sys
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus


def scraped(host, accept):
    request = urllib.request.Request(f"{host}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["content-type"], answer.read().decode()


def main():
    host = sys.argv[1]
    families = {}
    scraped(host, "text/plain")  # the first request is counted then
    for accept, parse in [("application/openmetrics-text; version=1.0.0", openmetrics), ("text/plain", prometheus)]:
        kind, text = scraped(host, accept)
        assert kind.startswith(accept.split(";")[0]), (accept, kind)
        families[accept] = {family.name: family for family in parse(text)}
        named = [name for name in families[accept] if name.startswith("cotenant_")]
        assert len(named) > 20, named
        bare = [family.name for family in families[accept].values() if not family.documentation]
        assert not bare, f"without help: {bare}"
        print(f"  ok  {len(named)} families of {kind}")
    one, other = ({name.removesuffix("_total").removesuffix("_info") for name in found} for found in families.values())
    assert one == other, one ^ other


if __name__ == "__main__":
    main()
