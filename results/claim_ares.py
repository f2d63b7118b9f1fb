"""`ares`: optimizers, ablations, estimators on the tiny RL task; `ares_spectra`: the spectrum of the gradient."""

from results.ares import claim
from results.running import REPO, run_arms, spread, write_table
from spectral_monitor import mean_over, plot_spectra, read_spectra


def ares(seeds, steps, out, jobs):
    arms = claim.sweep_arms()
    runs, _ = run_arms("ares", arms, seeds, steps, out, jobs, recipe="ares_dapo", every=10)
    heads, rows = zip(*claim.sweep_rows(runs, spread), strict=True)
    write_table("ares", ["arm", *heads[0]], rows, runs, seeds, steps, jobs, out)
    print("\n".join(claim.best_rates(rows, heads[0])))


def ares_spectra(seeds, steps, out, jobs):
    """Also on the larger model, where it was made: recipes/cold_start.py, see results/ares/claim.py."""
    larger = REPO / claim.LARGER
    arms = claim.spectra_arms(larger if larger.is_dir() else None)
    runs, work = run_arms("ares_spectra", arms, seeds, steps, out, jobs, recipe="ares_dapo", every=10)
    spectra = {
        arm: [read_spectra(work / f"{i}-{seed}" / "spectral.jsonl") for seed in seeds] for i, arm in enumerate(arms)
    }
    for model in ("tiny", "larger"):
        part = {arm.split(": ")[1]: records for arm, records in spectra.items() if arm.startswith(model)}
        if part:
            plot_spectra(part, out / f"spectral_{model}.png")
    rows = list(claim.spectra_rows(spectra, mean_over, spread))
    write_table("ares_spectra", claim.SPECTRA_HEAD, rows, runs, seeds, steps, jobs, out)
