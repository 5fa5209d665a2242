"""The API of a Kubernetes cluster: access, requests and watches, and the meaning of refusals."""
