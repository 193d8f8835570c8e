"""Facts and checks of `cachectl doctor`; above views/."""
