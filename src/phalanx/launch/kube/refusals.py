"""Explanations of the API's refusals: one sentence with a remedy, exit code 2 or 3."""

from __future__ import annotations

from phalanx.errors import PhalanxError, Problem, SystemFailure, UserError
from phalanx.launch.kube.access import KubeAccess
from phalanx.launch.kube.client import KubeRefusal


def explain_refusal(error: KubeRefusal, access: KubeAccess, *, what: str) -> PhalanxError:
    """Return the error to raise; `what` names the object, such as `JobSet llama-1`."""
    context = f"context {access.context}" if access.context else "the pod's service account"
    if error.status == 401:
        return UserError(
            Problem(
                where=context,
                what=f"{access.server} does not accept your credentials: the token is wrong or has expired",
                fix="log in again as your cluster's operator says (kubectl auth whoami shows when it works)",
            )
        )
    if error.status == 403 and "exceeded quota" in error.message:
        fix = "wait for your other jobs, or ask the operator for a larger ResourceQuota"
        return UserError(Problem(where=what, what=error.message, fix=fix))
    if error.status == 403:
        return UserError(
            Problem(
                where=what,
                what=f"{context} may not do this: {error.message}",
                fix="ask the operator for the role phalanx-user (phalanx cluster init --on k8s makes it), "
                "or choose another launch.namespace",
            )
        )
    if error.status == 404:
        fix = "phalanx launch checks the cluster first; if a namespace or CRD has just been removed, ask the operator"
        return UserError(Problem(where=what, what=error.message, fix=fix))
    if error.status == 409:
        return UserError(
            Problem(
                where=what,
                what="is there already, made by another launch",
                why="launching over it would change a job that somebody else may be running",
                fix="choose another --name, or phalanx cancel it first",
            )
        )
    if error.status in (400, 422) or "denied the request" in error.message:
        fix = "--out DIR writes what is sent; the cluster's version or policy may differ from what we know"
        return UserError(Problem(where=what, what=f"the cluster refuses it: {error.message}", fix=fix))
    if error.status == 429:
        fix = "wait, and launch fewer jobs at once; the operator sees it as apiserver 429s"
        return SystemFailure(Problem(where=access.server, what="the API is throttling us", why=error.message, fix=fix))
    message = f"answered {error.status} to {error.asked}: {error.message}"
    return SystemFailure(Problem(where=access.server, what=message, fix="try again; kubectl get --raw /readyz?verbose"))
