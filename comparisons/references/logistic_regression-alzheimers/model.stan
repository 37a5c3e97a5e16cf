data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  array[N] int<lower=0, upper=1> y;
  real<lower=0> scale;
}
parameters {
  vector[F] weight;
  real bias;
}
model {
  weight ~ normal(0, scale);
  bias ~ normal(0, scale);
  y ~ bernoulli_logit(x * weight + bias);
}
