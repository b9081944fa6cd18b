"""What methods and objectives are called, and where they were published."""

from collections.abc import Mapping

PAPERS: Mapping[str, tuple[str, str]] = {
    "random": ("random masks", ""),
    "magnitude": ("least weight magnitude (LWM)", ""),
    "global": ("the largest weights of the whole network", ""),
    "erk": (
        "weight magnitude at ERK's rates",
        "Evci et al., “Rigging the Lottery: Making All Tickets Winners”, ICML 2020",
    ),
    "lamp": (
        "weight magnitude at LAMP's rates",
        "Lee et al., “Layer-adaptive Sparsity for the Magnitude-based Pruning”, ICLR 2021",
    ),
    "hydra": ("HYDRA", "Sehwag et al., “HYDRA: Pruning Adversarially Robust Neural Networks”, NeurIPS 2020"),
    "harp": ("HARP", "Zhao and Wressnegger, “Holistic Adversarially Robust Pruning”, ICLR 2023"),
    "harp-s": (
        "HARP-S (scores only)",
        "Zhao and Wressnegger, “Holistic Adversarially Robust Pruning”, ICLR 2023",
    ),
    "harp-r": ("HARP-r (rates only)", "Zhao and Wressnegger, “Holistic Adversarially Robust Pruning”, ICLR 2023"),
    "tandem": ("Tandem, a method of HARP's developers", ""),
    "r-admm": ("R-ADMM", "Ye et al., “Adversarial Robustness vs. Model Compression, or Both?”, ICCV 2019"),
    "dnr": (
        "DNR",
        "Kundu et al., “DNR: A Tunable Robust Pruning Framework Through Dynamic Network Rewiring of DNNs”, "
        "ASP-DAC 2021",
    ),
    "anp-vs": (
        "ANP-VS",
        "Madaan et al., “Adversarial Neural Pruning with Latent Vulnerability Suppression”, ICML 2020",
    ),
    "mad": (
        "MAD",
        "Lee et al., “Masking Adversarial Damage: Finding Adversarial Saliency for Robust and Sparse Network”, "
        "CVPR 2022",
    ),
    "bcs-p": (
        "BCS-P",
        "Özdenizci and Legenstein, “Training Adversarially Robust Sparse Networks via Bayesian Connectivity Sampling”, "
        "ICML 2021",
    ),
    "flying-bird": (
        "Flying Bird",
        "Chen et al., “Sparsity Winning Twice: Better Robust Generalization from More Efficient Training”, ICLR 2022",
    ),
    "flying-bird+": (
        "Flying Bird+",
        "Chen et al., “Sparsity Winning Twice: Better Robust Generalization from More Efficient Training”, ICLR 2022",
    ),
    "twinrep": (
        "TwinRep",
        "Li et al., “Learning Adversarially Robust Sparse Networks via Weight Reparameterization”, AAAI 2023",
    ),
}
"""What each method is called, and where it was published."""

OBJECTIVES: Mapping[str, str] = {
    "natural": "natural training",
    "pgd": "adversarial training (Madry et al. 2018)",
    "fast": "fast adversarial training (Wong et al. 2020)",
    "free": "free adversarial training (Shafahi et al. 2019)",
    "trades": "TRADES (Zhang et al. 2019)",
    "mart": "MART (Wang et al. 2020)",
}
