"""What the tests of the chart stand on: real tools, Kubernetes' schemas, and an API server of our own."""
