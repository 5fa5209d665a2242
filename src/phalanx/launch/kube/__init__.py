"""The API of a Kubernetes cluster: who we are, requests and watches, what refusals mean."""
