data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  int<lower=2> classes;
  array[N] int<lower=1, upper=classes> y;  // labels from 1
  int<lower=1> width;
  real<lower=0> sigma;
  real<lower=0> concentration;
}
parameters {
  simplex[classes] cuts_probabilities;
  matrix[F, width] hidden_weight;
  row_vector[width] hidden_bias;
  vector[width] output_weight;
}
model {
  // The log odds that a label is at most k where f is 0.
  vector[classes - 1] cuts = log(cumulative_sum(cuts_probabilities)[1 : classes - 1])
                             - log(reverse(cumulative_sum(reverse(cuts_probabilities)))[2 : classes]);
  cuts_probabilities ~ dirichlet(rep_vector(concentration, classes));
  to_vector(hidden_weight) ~ normal(0, sigma / sqrt(F));
  hidden_bias ~ normal(0, sigma);
  output_weight ~ normal(0, sigma / sqrt(width));
  y ~ ordered_logistic(tanh(x * hidden_weight + rep_matrix(hidden_bias, N)) * output_weight, cuts);
}
